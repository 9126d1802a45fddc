"""What all rooms of the runtime may use: settings, interrupts, the garbage collector."""
