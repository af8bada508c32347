"""What tests of the core begin with, and what they read from its decisions."""
