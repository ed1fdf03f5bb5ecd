"""The only place that may spend: machines are found, set up, and later rented and released here."""
