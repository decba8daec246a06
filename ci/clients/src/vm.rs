//! The VM that clients make.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// What a client is told of the VM that it shall make.
#[derive(Clone, Debug)]
pub struct Vm {
    /// Where the VMM's API is.
    pub api_socket: PathBuf,
    /// A kernel.
    pub kernel: PathBuf,
    /// Its initramfs.
    pub initramfs: PathBuf,
    /// Where its serial console goes.
    pub console: PathBuf,
    /// Where its vsock device is, with the context id 3.
    pub vsock: PathBuf,
    /// Two disks' images of 64 MiB: one from the start, one to be added.
    pub disks: [PathBuf; 2],
    /// A file of 128 MiB, to be added as persistent memory.
    pub pmem: PathBuf,
}

impl Vm {
    /// The kernel's command line.
    pub const CMDLINE: &str = "console=ttyS0 loglevel=5";

    /// A path as JSON and the crate's models want it.
    pub fn text(path: &std::path::Path) -> String {
        path.display().to_string()
    }
}

/// Waits until the guest is up: what is asked of its drivers before that, nobody answers.
pub type UntilUp<'a> = &'a dyn Fn() -> Result<()>;

/// No guest takes longer for what it is asked, unless it hangs.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// How often something is looked at.
pub const LOOK: Duration = Duration::from_millis(20);

/// Looks until it is so.
pub fn wait_for(what: &str, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    let start = Instant::now();
    while !is_so()? {
        if start.elapsed() > PATIENCE {
            bail!("It is not so within {} s: {what}", PATIENCE.as_secs());
        }
        std::thread::sleep(LOOK);
    }
    Ok(())
}
