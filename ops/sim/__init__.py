"""The whole system in virtual time: production actors on the in-memory bus, one seed deciding everything."""
