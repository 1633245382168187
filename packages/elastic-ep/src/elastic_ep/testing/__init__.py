"""Fakes and conformance tests, for this package's tests and for those who implement its interfaces."""
