"""A bundle as a C++ project that builds, runs and checks itself."""
