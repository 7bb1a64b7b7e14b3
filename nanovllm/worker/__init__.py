"""The device side: one process per rank, which executes plans and never imports `engine/`."""
