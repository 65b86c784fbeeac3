"""All-reduce as scheduled: stages, chunks, transports."""
