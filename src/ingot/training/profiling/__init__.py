"""Where the time of steps goes, and what fills the memory when it runs out."""
