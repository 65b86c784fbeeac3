"""Links between the devices of a host, as their makers' own software tells them."""
