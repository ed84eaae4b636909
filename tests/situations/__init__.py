"""What users' modules and callbacks do to a training, under each strategy, with the numbers of one process as oracle.

A situation is a small module or callback that does one such thing. `running` trains it under a strategy; the test
generates the table of strategies and situations.
"""
