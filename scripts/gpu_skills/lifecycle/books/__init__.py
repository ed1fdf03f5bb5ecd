"""Each second and byte of a machine, booked once."""
