//! Verdict on the guest's BTT driver. [`kernel_gate`](super::kernel_gate) derives it from the
//! kernel that the agent reports. The verdict is logged once and can be queried at any time.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use balloon::proto::Hello;
use parking_lot::Mutex;
use tracing::{info, warn};

use super::interface::Chosen;
use super::kernel_gate::{GuestKernel, Verdict, classify};
use crate::metrics::{Expose, Exposition, Family, one};

/// Identity of a volume. A name is unique only within its pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeKey {
    pub pool: PathBuf,
    pub name: String,
}

/// BTT driver of the guest, with the volumes that it translates.
#[derive(Debug, Default)]
pub struct GuestBtt {
    /// Volumes whose sectors the guest translates.
    volumes: Mutex<Vec<(VolumeKey, Chosen)>>,
    max_vcpus: u8,
    reported: Mutex<Reported>,
    /// Number of verdicts of each kind, in the order of [`Verdict::LABELS`].
    verdicts: [AtomicU64; Verdict::LABELS.len()],
}

#[derive(Debug, Default)]
struct Reported {
    kernel: Option<GuestKernel>,
    warned: bool,
}

impl GuestBtt {
    /// Creates the record for `volumes`, which a guest with up to `max_vcpus` translates itself.
    pub fn new(volumes: Vec<(VolumeKey, Chosen)>, max_vcpus: u8) -> Self {
        Self { volumes: Mutex::new(volumes), max_vcpus, ..Self::default() }
    }

    /// Adds a volume that the running guest translates itself.
    pub fn add(&self, key: VolumeKey, interface: Chosen) {
        self.volumes.lock().push((key, interface));
    }

    pub fn remove(&self, key: &VolumeKey) {
        self.volumes.lock().retain(|(other, _)| other != key);
    }

    /// Records the kernel from an agent's hello message. Returns true if it logs a warning. It logs
    /// only once for each boot of the VM, so that an agent that reconnects or changes its report
    /// does not fill the log.
    pub fn hello(&self, hello: &Hello) -> bool {
        let kernel = GuestKernel {
            release: hello.kernel_release().to_owned(),
            version: hello.kernel_version().to_owned(),
            preemption: hello.preemption().to_owned(),
        };
        let volumes = self.volumes.lock();
        let worst = volumes
            .iter()
            .map(|(key, interface)| (key, classify(&kernel, *interface, self.max_vcpus)))
            .max_by_key(|(_, verdict)| verdict.severity());
        let mut reported = self.reported.lock();
        reported.kernel = Some(kernel);
        let Some((volume, verdict)) = worst else { return false };
        self.verdicts[verdict.severity()].fetch_add(1, Ordering::Relaxed);
        let Some(reason) = verdict.reason() else { return false };
        let first = !std::mem::replace(&mut reported.warned, true);
        if first {
            warn!(
                volume = volume.name,
                pool = %volume.pool.display(),
                verdict = verdict.label(),
                reason,
                "The guest's BTT driver could corrupt its volumes; use interface=virtio-blk, boot the guest with \
                 preempt=voluntary, or install a newer kernel in it (docs/reference/volumes.md)"
            );
        } else {
            info!(
                verdict = verdict.label(),
                reason, "The guest's BTT driver could still corrupt its volumes"
            );
        }
        first
    }

    /// Guest kernel in the agent's last report. `None` before the first report.
    pub fn kernel(&self) -> Option<GuestKernel> {
        self.reported.lock().kernel.clone()
    }

    /// Verdict on the driver for the volume `name` in `pool`. `None` if the VMM translates the
    /// volume, or no kernel is known yet.
    pub fn verdict(&self, pool: &Path, name: &str) -> Option<Verdict> {
        let is_it = |(key, _): &&(VolumeKey, Chosen)| key.pool == pool && key.name == name;
        let interface = self.volumes.lock().iter().find(is_it)?.1;
        match self.kernel() {
            Some(kernel) => Some(classify(&kernel, interface, self.max_vcpus)),
            // Faults that all kernels have are known before the report.
            None => Some(classify(&GuestKernel::default(), interface, self.max_vcpus))
                .filter(|verdict| matches!(verdict, Verdict::Unsafe(_))),
        }
    }

    /// Number of verdicts of each kind. Empty if the guest translates no volume.
    pub fn verdicts_total(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let has_volumes = !self.volumes.lock().is_empty();
        let counts = self.verdicts.iter().map(|count| count.load(Ordering::Relaxed));
        Verdict::LABELS.into_iter().zip(counts).filter(move |_| has_volumes)
    }
}

impl Expose for GuestBtt {
    fn expose(&self, out: &mut Exposition) {
        let verdicts =
            self.verdicts_total().map(|(verdict, count)| (one("verdict", verdict), count));
        let help = "Connections of agents, by the verdict on the BTT driver of the guest's kernel.";
        out.counters(Family("guest_btt_verdicts", help, None), verdicts);
    }
}

#[cfg(test)]
mod tests {
    use balloon::proto::{PROTOCOL_VERSION, RawHello};

    use super::*;

    fn hello(release: &str, preemption: &str) -> Hello {
        let raw = RawHello {
            version: PROTOCOL_VERSION,
            agent_version: "0.1.0".to_owned(),
            kernel_release: release.to_owned(),
            kernel_version: "#1 SMP PREEMPT_DYNAMIC".to_owned(),
            preemption: preemption.to_owned(),
            page_size_bytes: 4096,
        };
        raw.try_into().unwrap()
    }

    fn key(name: &str) -> VolumeKey {
        VolumeKey { pool: PathBuf::from("/p"), name: name.to_owned() }
    }

    fn verdict(btt: &GuestBtt, name: &str) -> Option<Verdict> {
        btt.verdict(Path::new("/p"), name)
    }

    fn totals(btt: &GuestBtt) -> Vec<u64> {
        btt.verdicts_total().map(|(_, count)| count).collect()
    }

    #[test]
    fn affected_kernel_is_counted_each_time_and_logged_once() {
        let btt = GuestBtt::new(vec![(key("data"), Chosen::Nvdimm)], 2);
        assert_eq!((btt.kernel(), verdict(&btt, "data")), (None, None));
        assert!(!btt.hello(&hello("6.12.117", "full")));
        assert_eq!(verdict(&btt, "data"), Some(Verdict::Safe));
        assert!(btt.hello(&hello("6.12.50", "full")));
        assert!(!btt.hello(&hello("6.12.50", "full")));
        assert!(!btt.hello(&hello("6.12.51", "dynamic")));
        assert_eq!(totals(&btt), [1, 0, 1, 2]);
        // The last report applies.
        assert_eq!(verdict(&btt, "data").unwrap().label(), "suspect");
        assert_eq!(btt.kernel().unwrap().release, "6.12.51");
        assert_eq!(verdict(&btt, "other"), None);
    }

    #[test]
    fn worst_verdict_of_several_volumes_counts_once() {
        let volumes = vec![(key("a"), Chosen::Nvdimm), (key("b"), Chosen::VirtioPmem)];
        let btt = GuestBtt::new(volumes, 2);
        // A fault that all kernels have.
        assert_eq!(verdict(&btt, "b").unwrap().label(), "unsafe");
        assert!(btt.hello(&hello("6.12.117", "voluntary")));
        assert_eq!(totals(&btt), [0, 0, 0, 1]);
        assert_eq!(verdict(&btt, "a"), Some(Verdict::Safe));
    }

    #[test]
    fn equal_volume_names_in_two_pools_have_separate_verdicts() {
        let other = VolumeKey { pool: PathBuf::from("/q"), name: "data".to_owned() };
        let btt =
            GuestBtt::new(vec![(key("data"), Chosen::Nvdimm), (other, Chosen::VirtioPmem)], 2);
        btt.hello(&hello("6.12.117", "voluntary"));
        assert_eq!(btt.verdict(Path::new("/p"), "data"), Some(Verdict::Safe));
        assert_eq!(btt.verdict(Path::new("/q"), "data").unwrap().label(), "unsafe");
        assert_eq!(btt.verdict(Path::new("/r"), "data"), None);
    }

    #[test]
    fn volume_has_a_verdict_while_it_is_attached() {
        let btt = GuestBtt::new(Vec::new(), 2);
        btt.add(key("data"), Chosen::VirtioPmem);
        assert_eq!(verdict(&btt, "data").unwrap().label(), "unsafe");
        assert!(btt.hello(&hello("6.12.117", "voluntary")));
        btt.remove(&key("data"));
        assert_eq!(verdict(&btt, "data"), None);
    }

    #[test]
    fn guest_without_translated_volumes_has_no_verdict() {
        let btt = GuestBtt::new(Vec::new(), 2);
        assert!(!btt.hello(&hello("6.12.50", "full")));
        assert_eq!(totals(&btt), Vec::<u64>::new());
        assert_eq!(btt.kernel().unwrap().preemption, "full");
    }
}
