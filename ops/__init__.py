"""Running it: recipes, launching, looking at it."""
