//! Replays of clients that are not available as crates. They send the clients' requests in order
//! and, except for paths, byte by byte. They interpret responses in the same way as the clients.

mod curl;
mod flintlock;
mod hypeman;
mod kata_go;
mod kata_runtime_rs;
mod libvirt;
mod virtink;

use anyhow::Result;

use crate::vm::{UntilUp, Vm};

/// Replay of a client's calls. The replay leaves the VMM without a VM.
pub type Replay = fn(&Vm, UntilUp) -> Result<()>;

pub const ALL: &[(&str, Replay)] = &[
    ("curl", curl::run),
    ("flintlock", flintlock::run),
    ("hypeman", hypeman::run),
    ("kata-go", kata_go::run),
    ("kata-runtime-rs", kata_runtime_rs::run),
    ("libvirt", libvirt::run),
    ("virtink", virtink::run),
];
