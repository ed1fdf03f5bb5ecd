"""Why did it fail, and may it be tried again? `gpu job diagnose`.

`failures.yaml` holds the classes, their signs and remedies; `classify` finds them in any text; `collect` gathers the
texts of a job and its machine; `attempts` counts what was tried before; `verdict` says what follows.
"""
