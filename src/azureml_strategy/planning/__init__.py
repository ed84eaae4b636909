"""The planner: what a run takes, holds and costs on any Azure size, before it is rented."""
