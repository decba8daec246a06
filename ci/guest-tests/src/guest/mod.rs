//! Guests that run under Foreshore.

mod builder;
pub(crate) mod console;
mod machine;
mod process;
mod shell;
pub(crate) mod unpacked;

use std::ops::Deref;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

pub use builder::{GuestBuilder, Image, Kernel, Refusal};
pub use console::{complaints, without_logs};
pub use machine::{BOOT_LIMIT, Machine};
pub use process::{VmmProcess, program};
pub use shell::{Endpoint, Output, Script};

use self::console::LogTails;
use crate::http::{self, Response};
use crate::metrics::Metrics;

/// Running guest. Drop kills its VMM.
#[derive(Debug)]
pub struct Guest {
    machine: Machine,
    paths: Paths,
    metrics_address: String,
}

/// Files of a VM in the test's directory.
#[derive(Debug, Clone)]
struct Paths {
    dir: PathBuf,
    name: String,
}

impl Paths {
    fn file(&self, description: &str) -> PathBuf {
        self.dir.join(format!("{}.{description}", self.name))
    }
    fn api(&self) -> PathBuf {
        self.file("api")
    }
    fn vsock(&self) -> PathBuf {
        self.file("vsock")
    }
    fn console(&self) -> PathBuf {
        self.file("console.log")
    }
    fn vmm_log(&self) -> PathBuf {
        self.file("vmm.log")
    }
}

impl Deref for Guest {
    type Target = Machine;

    fn deref(&self) -> &Machine {
        &self.machine
    }
}

impl Guest {
    /// Returns a builder for a guest with 512 MiB of DRAM and the basic image. The kernel and the
    /// vCPUs are those of the test's row. Outside of a test, they are Debian's 6.12 and one vCPU.
    pub fn builder() -> GuestBuilder {
        GuestBuilder::new()
    }

    /// Calls the API, for example `guest.api("PUT", "vm.resize", Some(json!({...})))`. A status
    /// outside of 2xx is an error.
    pub fn api(&self, method: &str, call: &str, body: Option<Value>) -> Result<Value> {
        let response = self.try_api(method, call, body)?;
        ensure!(
            (200..300).contains(&response.status),
            "{method} {call}: status {}: {}",
            response.status,
            response.body
        );
        if response.body.is_empty() {
            return Ok(Value::Null);
        }
        response.json().with_context(|| format!("The answer to {call}"))
    }

    pub fn get(&self, call: &str) -> Result<Value> {
        self.api("GET", call, None)
    }

    pub fn put(&self, call: &str, body: Value) -> Result<Value> {
        self.api("PUT", call, Some(body))
    }

    /// Calls the API with `PUT` and without a body.
    pub fn command(&self, call: &str) -> Result<Value> {
        self.api("PUT", call, None)
    }

    pub fn try_put(&self, call: &str, body: Value) -> Result<Response> {
        self.try_api("PUT", call, Some(body))
    }

    pub fn try_api(&self, method: &str, call: &str, body: Option<Value>) -> Result<Response> {
        let body = body.map(|body| body.to_string());
        http::request_unix(&self.paths.api(), method, &format!("/api/v1/{call}"), body.as_deref())
    }

    pub fn api_socket(&self) -> PathBuf {
        self.paths.api()
    }

    pub fn vsock_socket(&self) -> PathBuf {
        self.paths.vsock()
    }

    pub fn metrics_address(&self) -> &str {
        &self.metrics_address
    }

    pub fn metrics(&self) -> Result<Metrics> {
        let response = http::request_tcp(&self.metrics_address, "GET", "/metrics", None)?;
        ensure!(response.status == 200, "/metrics: status {}: {}", response.status, response.body);
        Metrics::parse(&response.body)
    }

    pub fn metric(&self, name: &str, labels: &[(&str, &str)]) -> Result<f64> {
        self.metrics()?.value(name, labels)
    }

    /// Kills the VMM as a power cut would, and waits until it has ended.
    pub fn kill9(mut self) -> Result<()> {
        self.machine.process.kill()
    }

    pub fn wait_for_exit(mut self, limit: Duration) -> Result<ExitStatus> {
        self.machine.process.wait_for_exit(limit)
    }

    /// Powers the guest off from inside, and checks that the VMM ends without an error.
    pub fn power_off(self) -> Result<()> {
        self.run_to_its_end("sync; poweroff -f")?;
        let log = self.machine.log.clone();
        let status = self.wait_for_exit(BOOT_LIMIT)?;
        if status.success() {
            return Ok(());
        }
        let message = format!("The VMM ended with {} after a power-off", describe(status));
        Err(LogTails::read(&[("the VMM's last lines", &log)]).below(message))
    }
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => status.to_string(),
    }
}
