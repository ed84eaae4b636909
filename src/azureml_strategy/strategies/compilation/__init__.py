"""Training with compiled modules: what is compiled, and the compiled code that outlives a node."""
