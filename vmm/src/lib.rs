//! A virtual machine monitor whose guests share one pool of persistent memory.
