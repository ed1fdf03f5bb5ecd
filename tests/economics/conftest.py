from hypothesis import settings

# The properties are about sums, not about speed: a machine that is busy with other tests must not fail one.
settings.register_profile("economics", deadline=None)
settings.load_profile("economics")
