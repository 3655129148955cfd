"""`rollstream bench soak`: a real run whose workers come and go all the time, watched for leaks, age and waste."""
