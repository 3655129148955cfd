"""The controller: admits groups of prompts, forms batches."""
