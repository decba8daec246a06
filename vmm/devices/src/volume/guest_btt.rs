//! What is thought of the guest's BTT driver: asked of [`kernel_gate`](super::kernel_gate) when an
//! agent says which kernel it runs on, told once in the log, and at any time to whoever asks.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use balloon::proto::Hello;
use parking_lot::Mutex;
use tracing::{info, warn};

use super::interface::Chosen;
use super::kernel_gate::{GuestKernel, Verdict, judge};
use crate::metrics::{Expose, Exposition, Family, one};

/// Which volume: names are a pool's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeKey {
    pub pool: PathBuf,
    pub name: String,
}

/// The guest's BTT driver, if it translates any volume.
#[derive(Debug, Default)]
pub struct GuestBtt {
    /// Volumes whose sectors the guest translates.
    volumes: Vec<(VolumeKey, Chosen)>,
    max_vcpus: u8,
    said: Mutex<Said>,
    /// How often each verdict of [`Verdict::LABELS`] was reached.
    verdicts: [AtomicU64; Verdict::LABELS.len()],
}

#[derive(Debug, Default)]
struct Said {
    kernel: Option<GuestKernel>,
    warned: bool,
}

impl GuestBtt {
    /// For `volumes` that a guest of up to `max_vcpus` translates itself.
    pub fn new(volumes: Vec<(VolumeKey, Chosen)>, max_vcpus: u8) -> Self {
        Self { volumes, max_vcpus, ..Self::default() }
    }

    /// An agent says who it is. True if its kernel is warned of, which happens once in the life of
    /// a machine: an agent that comes and goes, or says something else each time, fills no log.
    pub fn hello(&self, hello: &Hello) -> bool {
        let kernel = GuestKernel {
            release: hello.kernel_release().to_owned(),
            version: hello.kernel_version().to_owned(),
            preemption: hello.preemption().to_owned(),
        };
        let worst = self
            .volumes
            .iter()
            .map(|(key, interface)| (key, judge(&kernel, *interface, self.max_vcpus)))
            .max_by_key(|(_, verdict)| verdict.severity());
        let mut said = self.said.lock();
        said.kernel = Some(kernel);
        let Some((volume, verdict)) = worst else { return false };
        self.verdicts[verdict.severity()].fetch_add(1, Ordering::Relaxed);
        let Some(reason) = verdict.reason() else { return false };
        let first = !std::mem::replace(&mut said.warned, true);
        if first {
            warn!(
                volume = volume.name,
                pool = %volume.pool.display(),
                verdict = verdict.label(),
                reason,
                "The guest's BTT driver is not to be trusted with its volumes: take interface=virtio-blk, boot the \
                 guest with preempt=voluntary, or give it a newer kernel (docs/reference/volumes.md)"
            );
        } else {
            info!(
                verdict = verdict.label(),
                reason, "The guest's BTT driver is still not to be trusted"
            );
        }
        first
    }

    /// The guest's kernel as its agent last said; `None` before that.
    pub fn kernel(&self) -> Option<GuestKernel> {
        self.said.lock().kernel.clone()
    }

    /// What is thought of the driver for the volume called `name` in `pool`. `None`: the VMM
    /// translates it, or nothing is known yet.
    pub fn verdict(&self, pool: &Path, name: &str) -> Option<Verdict> {
        let (_, interface) =
            self.volumes.iter().find(|(key, _)| key.pool == pool && key.name == name)?;
        match self.kernel() {
            Some(kernel) => Some(judge(&kernel, *interface, self.max_vcpus)),
            // What is wrong with every kernel is known before one says who it is.
            None => Some(judge(&GuestKernel::default(), *interface, self.max_vcpus))
                .filter(|verdict| matches!(verdict, Verdict::Unsafe(_))),
        }
    }

    /// How often each verdict was reached, if the guest translates any volume.
    pub fn verdicts_total(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let counts = self.verdicts.iter().map(|count| count.load(Ordering::Relaxed));
        Verdict::LABELS.into_iter().zip(counts).filter(|_| !self.volumes.is_empty())
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
    fn an_affected_kernel_is_counted_each_time_and_warned_of_once() {
        let btt = GuestBtt::new(vec![(key("data"), Chosen::Nvdimm)], 2);
        assert_eq!((btt.kernel(), verdict(&btt, "data")), (None, None));
        assert!(!btt.hello(&hello("6.12.117", "full")));
        assert_eq!(verdict(&btt, "data"), Some(Verdict::Safe));
        assert!(btt.hello(&hello("6.12.50", "full")));
        assert!(!btt.hello(&hello("6.12.50", "full")));
        assert!(!btt.hello(&hello("6.12.51", "dynamic")));
        assert_eq!(totals(&btt), [1, 0, 1, 2]);
        // What was said last counts.
        assert_eq!(verdict(&btt, "data").unwrap().label(), "suspect");
        assert_eq!(btt.kernel().unwrap().release, "6.12.51");
        assert_eq!(verdict(&btt, "other"), None);
    }

    #[test]
    fn the_worst_of_several_volumes_counts_once() {
        let volumes = vec![(key("a"), Chosen::Nvdimm), (key("b"), Chosen::VirtioPmem)];
        let btt = GuestBtt::new(volumes, 2);
        // Known of every kernel.
        assert_eq!(verdict(&btt, "b").unwrap().label(), "unsafe");
        assert!(btt.hello(&hello("6.12.117", "voluntary")));
        assert_eq!(totals(&btt), [0, 0, 0, 1]);
        assert_eq!(verdict(&btt, "a"), Some(Verdict::Safe));
    }

    #[test]
    fn volumes_of_one_name_in_two_pools_have_verdicts_of_their_own() {
        let other = VolumeKey { pool: PathBuf::from("/q"), name: "data".to_owned() };
        let btt =
            GuestBtt::new(vec![(key("data"), Chosen::Nvdimm), (other, Chosen::VirtioPmem)], 2);
        btt.hello(&hello("6.12.117", "voluntary"));
        assert_eq!(btt.verdict(Path::new("/p"), "data"), Some(Verdict::Safe));
        assert_eq!(btt.verdict(Path::new("/q"), "data").unwrap().label(), "unsafe");
        assert_eq!(btt.verdict(Path::new("/r"), "data"), None);
    }

    #[test]
    fn a_guest_that_translates_nothing_is_not_judged() {
        let btt = GuestBtt::new(Vec::new(), 2);
        assert!(!btt.hello(&hello("6.12.50", "full")));
        assert_eq!(totals(&btt), Vec::<u64>::new());
        assert_eq!(btt.kernel().unwrap().preemption, "full");
    }
}
