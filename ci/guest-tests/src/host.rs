//! Host on which the VMs run.

use std::process::Command;

use anyhow::{Result, ensure};

/// Runs a command in a shell.
pub fn run(command: &str) -> Result<()> {
    let status = Command::new("sh").args(["-c", command]).status()?;
    ensure!(status.success(), "`{command}` ended with {status}");
    Ok(())
}

/// Loads modules. Errors are ignored, because modules may be built in.
pub fn load_modules(names: &[&str]) {
    for name in names {
        let _ = Command::new("modprobe").arg(name).status();
    }
}

/// Bridge that is removed on drop, so that a failed test does not leave it behind.
pub struct Bridge(&'static str);

impl Bridge {
    pub fn create(name: &'static str) -> Result<Self> {
        run(&format!("brctl addbr {name}"))?;
        let bridge = Self(name);
        run(&format!("ip link set {name} up"))?;
        Ok(bridge)
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        let _ = run(&format!("ip link set {0} down; brctl delbr {0}", self.0));
    }
}
