"""What a person is asked, and what counts as a yes."""
