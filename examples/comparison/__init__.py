"""What compare.py is made of: a run, the folder that keeps runs, what they say together."""
