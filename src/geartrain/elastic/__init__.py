"""Membership that changes while training runs: who takes part, and what is committed."""
