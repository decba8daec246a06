//! `--no-shutdown`.

/// What follows when a guest switches itself off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AtGuestShutdown {
    #[default]
    End,
    /// The VM is shut down, and the VMM serves on (`--no-shutdown`).
    Stay,
}
