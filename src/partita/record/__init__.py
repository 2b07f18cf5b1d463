"""What a run leaves on disk: the names of its files, the quantities of its rows, and how they are read without trust.

Everything that shows a run imports this package, so it needs neither torch nor the code that trains.
"""
