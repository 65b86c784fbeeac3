"""What faults, joins and commits cost: many of each in real runs, from the outside."""
