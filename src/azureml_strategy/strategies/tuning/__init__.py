"""Which communication settings of DDP are fastest here: measured on the job's own processes, model and batch."""
