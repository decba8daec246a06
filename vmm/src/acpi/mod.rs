//! The guest's ACPI tables, hardware-reduced (ACPI 6.5, 4.1).
