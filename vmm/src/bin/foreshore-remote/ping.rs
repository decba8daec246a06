//! Subcommand `ping`: checks that a VMM answers, or waits until it does.

use std::io::ErrorKind;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use foreshore::api::{Client, ClientError, PingAnswer};
use tokio::time::{Instant, sleep, timeout_at};

use crate::output::{Origin, Output};

/// Time limit of `--wait` without a number.
const DEFAULT_WAIT: &str = "60";
/// Delay between two attempts to connect. A VMM listens within some milliseconds after its start.
const RETRY: Duration = Duration::from_millis(20);

#[derive(Debug, Args)]
pub(crate) struct Ping {
    /// Wait until a VMM listens and answers, at most this time [default: 60]
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = DEFAULT_WAIT)]
    wait: Option<u32>,
    #[command(flatten)]
    output: Output,
}

impl Ping {
    pub(crate) async fn execute(self, vmm: &Client) -> Result<String> {
        let answer = match self.wait {
            Some(seconds) => wait(vmm, seconds).await?,
            None => vmm.get("vmm.ping").await?.into(),
        };
        self.output.format(Origin::ChRemote, &answer, |ping: &PingAnswer| {
            format!("foreshore {}, process {}\n", ping.build_version, ping.pid)
        })
    }
}

/// Returns the first answer of a VMM.
async fn wait(vmm: &Client, seconds: u32) -> Result<Vec<u8>> {
    let late = || format!("no VMM has answered within {seconds} s");
    let deadline = Instant::now() + Duration::from_secs(seconds.into());
    loop {
        match timeout_at(deadline, vmm.get("vmm.ping")).await.with_context(late)? {
            Err(error) if !may_pass(&error) => return Err(error.into()),
            Err(error) if Instant::now() + RETRY > deadline => {
                return Err(error).with_context(late);
            }
            Err(_) => sleep(RETRY).await,
            Ok(answer) => return Ok(answer.into()),
        }
    }
}

/// Returns true for an error that disappears once the VMM has started. The socket does not exist
/// yet, or an earlier VMM left it behind.
fn may_pass(error: &ClientError) -> bool {
    let ClientError::Connect { source, .. } = error else { return false };
    matches!(source.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused)
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn only_a_missing_listener_is_waited_for() {
        for (kind, expected) in [
            (ErrorKind::NotFound, true),
            (ErrorKind::ConnectionRefused, true),
            (ErrorKind::PermissionDenied, false),
            (ErrorKind::NotADirectory, false),
        ] {
            let source = io::Error::from(kind);
            let error = ClientError::Connect { path: "/s".into(), source };
            assert_eq!(may_pass(&error), expected, "{kind}");
        }
        let answer = ClientError::Answer { path: "/s".into(), reason: "no HTTP".to_owned() };
        assert!(!may_pass(&answer));
    }
}
