"""The command line: one file per noun, each verb's parser, help and text together.

Nothing here decides; it calls the functions below.
"""
