"""`rollstream plan`: what a cluster would do, from the speeds of its parts. Production decisions, modelled machines."""
