// Empty: exists to own the precompiled headers of the tests.
