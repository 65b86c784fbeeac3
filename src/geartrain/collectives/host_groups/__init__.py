"""The processes of one host as one member of the exchange between hosts."""
