"""What the tests of readings and reports share."""
