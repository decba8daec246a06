//! What is resident of a VM's memory: dear to find out, so not on the thread of the VM's owner, and not too often.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::warn;

use super::cached::Cached;
use super::request::{Reply, ZoneInfo};

/// It is found out no more often than that while nothing is plugged or unplugged, whoever asks: the kernel walks the
/// page tables of all mappings for it, which takes milliseconds.
const MAX_AGE: Duration = Duration::from_secs(1);

/// The resident bytes of all zones.
pub struct Resident {
    read: Box<dyn Fn() -> io::Result<Vec<u64>> + Send + Sync>,
    /// By what is plugged. Whoever comes while it is read anew waits, and finds it.
    last: Mutex<Cached<Vec<u64>, Vec<u64>>>,
}

impl Resident {
    /// What `read` finds, of each zone, in their order.
    pub fn new(read: impl Fn() -> io::Result<Vec<u64>> + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self { read: Box::new(read), last: Mutex::new(Cached::new(MAX_AGE)) })
    }

    /// Answers with `zones`, with what is resident of them, from a thread where blocking is allowed. The caller goes
    /// on at once. To be called in a runtime.
    pub fn answer(self: Arc<Self>, mut zones: Vec<ZoneInfo>, reply: Reply<Vec<ZoneInfo>>) {
        tokio::task::spawn_blocking(move || {
            let plugged = zones.iter().map(|zone| zone.plugged_bytes).collect();
            let mut last = self.last.lock();
            let resident = last.get(plugged, Instant::now(), || {
                (self.read)().unwrap_or_else(|err| {
                    warn!(%err, "What is resident cannot be found out");
                    vec![0; zones.len()]
                })
            });
            for (zone, bytes) in zones.iter_mut().zip(resident) {
                zone.resident_bytes = *bytes;
            }
            // A client that has gone does not want its answer any more.
            let _ = reply.send(Ok(zones));
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use tokio::sync::oneshot;

    use super::*;
    use crate::vm::request::ResizeStatus;

    fn zone() -> ZoneInfo {
        ZoneInfo {
            id: "dram".to_owned(),
            tier: "dram".to_owned(),
            guest_numa_node: 0,
            boot_bytes: 1 << 30,
            hotplug_bytes: 0,
            requested_bytes: 0,
            plugged_bytes: 0,
            online_bytes: None,
            resident_bytes: 0,
            status: ResizeStatus::Reached,
        }
    }

    #[test]
    fn nobody_waits_for_it_but_who_asked() {
        let (go_on, wait) = mpsc::channel();
        let wait = Mutex::new(wait);
        let resident = Resident::new(move || {
            let waited = wait.lock().recv_timeout(Duration::from_secs(30));
            waited.map(|()| vec![4096]).map_err(io::Error::other)
        });
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let [(reply, answer), (reply_2, answer_2)] = [(), ()].map(|()| oneshot::channel());
            Arc::clone(&resident).answer(vec![zone()], reply);
            Arc::clone(&resident).answer(vec![zone()], reply_2);
            // Only now, on the thread that has called.
            go_on.send(()).unwrap();
            for answer in [answer, answer_2] {
                assert_eq!(answer.await.unwrap().unwrap()[0].resident_bytes, 4096);
            }
        });
    }
}
