"""What the journal, the provider and the machine say after a death, put together again."""
