"""Where machines come from: one file per provider, one shape (base.py)."""
