"""The cache of a node: one process that fetches a packed set from its storage for all ranks and workers of a machine.

`client.py` is what a training uses. `server.py` is the process; it imports neither torch nor Lightning.
"""
