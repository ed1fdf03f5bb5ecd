"""Durable homes of outputs: a folder, a bucket, a provider's volume, behind one interface (`base.Store`)."""
