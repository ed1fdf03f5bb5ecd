"""What is wanted, measured on the market: candidates, worst case, all reasons against it, frozen by its hash."""
