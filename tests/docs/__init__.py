"""The documentation as tests: its blocks are run, its site is built, its links are followed."""
