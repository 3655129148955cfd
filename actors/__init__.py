"""The actors: pure cores inside one thin shell. Importing this package imports no torch and no nats."""
