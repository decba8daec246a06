//! Pools for tests. `pmvol` creates and inspects them.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_tools::wait::wait_until;
use rustix::process::geteuid;
use serde_json::Value;

use crate::guest::program;
use crate::runner::this_tests_dir;

/// Time limit for erasing a few GiB under emulation.
const SCRUB_LIMIT: Duration = Duration::from_secs(60);

/// Pool file in the test's directory. On tmpfs, the number of blocks in the file shows how much
/// memory has been returned.
#[derive(Debug, Clone)]
pub struct Pool {
    path: PathBuf,
}

impl Pool {
    pub fn create(size: &str) -> Result<Self> {
        let dir = this_tests_dir();
        fs::create_dir_all(&dir).with_context(|| format!("Cannot create {}", dir.display()))?;
        Self::create_in(&dir, size)
    }

    pub fn create_in(dir: &Path, size: &str) -> Result<Self> {
        let pool = Self::at(dir);
        pmvol(&["create", &pool.name(), "--size", size])?;
        Ok(pool)
    }

    pub fn at(dir: &Path) -> Self {
        Self::by_path(&dir.join("pool"))
    }

    /// Pool at the path of a file or device that may not exist yet.
    pub fn by_path(path: &Path) -> Self {
        Self { path: path.to_owned() }
    }

    /// Creates a volume that tests may attach by any interface.
    pub fn create_volume(&self, name: &str, size: &str) -> Result<()> {
        let allocation = if maps_thin_volumes() { "--thin" } else { "--thick" };
        pmvol(&["volume", "create", &self.name(), name, "--size", size, allocation]).map(drop)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn name(&self) -> String {
        self.path.display().to_string()
    }

    pub fn check(&self) -> Result<String> {
        pmvol(&["check", &self.name()])
    }

    pub fn info(&self) -> Result<Value> {
        let text = pmvol(&["info", &self.name(), "--json"])?;
        serde_json::from_str(&text)
            .with_context(|| format!("Unexpected output of pmvol info --json: {text:?}"))
    }

    pub fn durability(&self) -> Result<String> {
        let info = self.info()?;
        let durability = info["durability"].as_str();
        Ok(durability.with_context(|| format!("pmvol info has no durability: {info}"))?.to_owned())
    }

    /// Waits until returned memory has been erased. The VMM does this in the background.
    pub fn wait_until_clean(&self) -> Result<()> {
        wait_until("the pool is clean", SCRUB_LIMIT, || Ok(self.info()?["scrubbing_bytes"] == 0))
    }

    pub fn occupied_bytes(&self) -> Result<u64> {
        // st_blocks is in units of 512 bytes, whatever the block size of the file system (stat(2)).
        Ok(fs::metadata(&self.path)?.blocks() * 512)
    }
}

/// Keys of `--pm-volume` that create a volume that tests may attach by any interface.
pub fn create_keys() -> &'static str {
    if maps_thin_volumes() { "create=on" } else { "create=on,thin=off" }
}

/// Returns false for an ordinary user, who cannot open `/dev/userfaultfd`.
fn maps_thin_volumes() -> bool {
    geteuid().is_root()
}

/// Runs `pmvol` and returns its output. A non-zero exit code is an error.
pub fn pmvol(arguments: &[&str]) -> Result<String> {
    let output =
        Command::new(program("pmvol")).args(arguments).output().context("Cannot start pmvol")?;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "pmvol {} ended with {}:\n{stdout}{stderr}",
        arguments.join(" "),
        output.status
    );
    Ok(stdout)
}
