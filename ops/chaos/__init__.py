"""`rollstream chaos`: kill and stop random processes of real runs, and prove from the log that nothing came of it."""
