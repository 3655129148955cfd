"""The OpenAI-compatible endpoint: agents that know nothing of Rollstream are its episodes."""
