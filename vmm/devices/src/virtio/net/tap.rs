//! Tap interfaces of the host (Linux Documentation/networking/tuntap.rst).

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, UdpSocket};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;

use libc::{
    IFF_DETACH_QUEUE, IFF_MULTI_QUEUE, IFF_NO_PI, IFF_TAP, IFF_VNET_HDR, c_int, c_short, c_ulong,
    ifreq, in6_ifreq,
};
use parking_lot::Mutex;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use thiserror::Error;

use super::config::HostAddress;
use super::header::{HEADER_LEN, Offloads};
use super::metrics::Traffic;

const DEVICE: &str = "/dev/net/tun";
/// Default name of a new interface. The kernel replaces `%d` with a number.
const DEFAULT_NAME: &str = "vmtap%d";
/// `IFF_ATTACH_QUEUE` of linux/if_tun.h.
const IFF_ATTACH_QUEUE: c_int = 0x0200;

/// The host side of a virtio-net device.
pub trait HostInterface: Send + Sync {
    /// Returns the queue of a pair. At most one worker may read it at a time.
    fn queue(&self, pair: u16) -> io::Result<Box<dyn HostQueue>>;
    /// Sets the offloads that the kernel may use in frames to the guest.
    fn set_offloads(&self, offloads: Offloads) -> io::Result<()>;
    /// Attaches the first `pairs` queues and detaches the others.
    fn set_pairs(&self, pairs: u16) -> io::Result<()>;
    /// Returns the file of a pair's queue, which vhost-net reads and writes.
    fn file(&self, pair: u16) -> io::Result<File>;
    /// Returns true if the interface still exists. An administrator may remove it at any time.
    fn exists(&self) -> bool;
    /// Traffic from and to the guest since the interface was created. `None` if it is unknown.
    fn traffic(&self) -> Option<[Traffic; 2]>;
}

/// One queue of an interface. Its methods do not block.
pub trait HostQueue: Send {
    /// Receives a frame with its header. Fails with `EBADFD` if the interface was removed or the
    /// queue is detached.
    fn receive(&mut self, packet: &mut [u8]) -> io::Result<usize>;
    /// Sends a frame with its header.
    fn send(&mut self, packet: &[u8]) -> io::Result<()>;
    /// Descriptor that is readable while a frame is available.
    fn input(&self) -> RawFd;
    /// Descriptor that is writable while there is space for a frame. It differs from `input`,
    /// because the event loop watches each descriptor separately.
    fn output(&self) -> RawFd;
}

/// Error that occurred while creating or opening an interface.
#[derive(Debug, Error)]
pub enum TapError {
    #[error(
        "cannot open {DEVICE}; is the module tun loaded, and the device in the folder of --chroot?"
    )]
    Open(#[source] io::Error),
    #[error("cannot attach to the interface {name}{hint}")]
    Attach {
        name: String,
        /// Likely cause, preceded by a colon. May be empty.
        hint: &'static str,
        #[source]
        source: io::Error,
    },
    /// The kernel refused a setting.
    #[error("cannot set {what} of the interface {name}{hint}")]
    Set {
        what: &'static str,
        name: String,
        /// Command that root can run instead, preceded by a colon. May be empty.
        hint: String,
        #[source]
        source: io::Error,
    },
    /// A descriptor that the user passed is not a queue of a tap interface.
    #[error("fd {fd} is not a tap interface")]
    NoTap {
        fd: RawFd,
        #[source]
        source: io::Error,
    },
    #[error("fd {fd} is a tap interface opened {lacks}")]
    Lacks {
        fd: RawFd,
        /// Description of the missing or unsuitable flag.
        lacks: &'static str,
    },
    #[error("fd {fd} is a queue of {name}, but the fds before it are queues of {first}")]
    Mixed { fd: RawFd, name: String, first: String },
}

/// Options for the interface to create or attach to.
#[derive(Clone, Debug, Default)]
pub struct TapOptions {
    pub name: Option<String>,
    /// Number of queue pairs. A pair consists of a receive and a transmit queue.
    pub pairs: u16,
    /// IP address of the host. The IP address is set only if the interface is created.
    pub address: Option<HostAddress>,
    /// Ethernet address of the host.
    pub host_mac: Option<[u8; 6]>,
    /// Maximum payload of a frame.
    pub mtu: Option<u16>,
}

/// A tap interface and its queues.
#[derive(Debug)]
pub struct Tap {
    name: String,
    queues: Vec<File>,
    mtu: Option<u16>,
    /// True if the interface is in the network namespace of this process, where its name can be
    /// looked up.
    is_ours: bool,
    /// Number of attached queues.
    attached: Mutex<u16>,
}

impl Tap {
    /// Attaches to an existing interface or creates one.
    pub fn open(options: &TapOptions) -> Result<Self, TapError> {
        let wanted = options.name.as_deref().unwrap_or(DEFAULT_NAME);
        let exists = options.name.as_deref().is_some_and(exists);
        let multi_queue = if options.pairs > 1 { IFF_MULTI_QUEUE } else { 0 };
        let (first, name) = match attach(wanted, multi_queue) {
            // If an existing interface was created for several queues, the first queue needs the
            // flag as well.
            Err(TapError::Attach { source, .. })
                if exists && multi_queue == 0 && source.raw_os_error() == Some(libc::EINVAL) =>
            {
                attach(wanted, IFF_MULTI_QUEUE)?
            }
            result => result?,
        };
        let mut queues = vec![first];
        for _ in 1..options.pairs {
            queues.push(attach(&name, multi_queue)?.0);
        }
        let mut tap = Self::new(name, queues)?;
        tap.configure(options, exists)?;
        Ok(tap)
    }

    /// Duplicates queues that another program has opened. Changes only those settings of the
    /// interface that the device requires, because the interface may be in another network
    /// namespace.
    pub fn from_fds(given: &[RawFd], mtu: Option<u16>) -> Result<Self, TapError> {
        let (name, fds) = check_given(given)?;
        let tap = Self::new(name, fds.into_iter().map(File::from).collect())?;
        Ok(Self { mtu, is_ours: false, ..tap })
    }

    fn new(name: String, queues: Vec<File>) -> Result<Self, TapError> {
        let attached =
            Mutex::new(u16::try_from(queues.len()).expect("no more queues than a device has"));
        let tap = Self { name, queues, mtu: None, is_ours: true, attached };
        let set = |what| tap.failed(what);
        for queue in &tap.queues {
            set_nonblocking(queue).map_err(set("the mode"))?;
            let len = HEADER_LEN as c_int;
            // SAFETY: the kernel reads one `int`.
            check(unsafe { libc::ioctl(queue.as_raw_fd(), libc::TUNSETVNETHDRSZ, &raw const len) })
                .map_err(set("the header's length"))?;
        }
        tap.set_offloads(Offloads::default()).map_err(set("the offloads"))?;
        Ok(tap)
    }

    fn failed(&self, what: &'static str) -> impl Fn(io::Error) -> TapError + use<'_> {
        self.failed_unless_root(what, String::new())
    }

    /// Creates an error for a setting that needs CAP_NET_ADMIN. `arguments` are the arguments of
    /// the `ip` command that root can run instead.
    fn failed_unless_root(
        &self,
        what: &'static str,
        arguments: String,
    ) -> impl Fn(io::Error) -> TapError + use<'_> {
        move |source| {
            let hint = match source.raw_os_error() {
                Some(libc::EPERM) if !arguments.is_empty() => {
                    format!(
                        ": it needs CAP_NET_ADMIN; without it, run as root beforehand: ip {arguments}"
                    )
                }
                _ => String::new(),
            };
            TapError::Set { what, name: self.name.clone(), hint, source }
        }
    }

    /// Applies all settings that are made by the interface's name, and sets the interface up. An
    /// existing interface retains its IP addresses.
    fn configure(&mut self, options: &TapOptions, was_there: bool) -> Result<(), TapError> {
        let socket =
            UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).map_err(self.failed("anything"))?;
        let name = self.name.clone();
        let get = |what: &'static str, request: c_ulong| {
            let mut interface = named(&name);
            call(&socket, request, &mut interface).map_err(self.failed(what)).map(|()| interface)
        };
        let set = |what, arguments: String, request: c_ulong, fill: &dyn Fn(&mut ifreq)| {
            let mut interface = named(&name);
            fill(&mut interface);
            call(&socket, request, &mut interface).map_err(self.failed_unless_root(what, arguments))
        };
        // The kernel requires a privilege even if a call changes nothing, so a value is set only if
        // it differs.
        if let Some(mac) = options.host_mac {
            let found = get("the Ethernet address", libc::SIOCGIFHWADDR)?;
            // SAFETY: the kernel has filled this member of the union.
            if unsafe { found.ifr_ifru.ifru_hwaddr }.sa_data[..6] != ethernet(mac).sa_data[..6] {
                let address = mac.map(|byte| format!("{byte:02x}")).join(":");
                let arguments = format!("link set dev {name} address {address}");
                set("the Ethernet address", arguments, libc::SIOCSIFHWADDR, &|interface| {
                    interface.ifr_ifru.ifru_hwaddr = ethernet(mac);
                })?;
            }
        }
        match options.address.filter(|_| !was_there) {
            Some(HostAddress::V4(address, mask)) => {
                set("the address", String::new(), libc::SIOCSIFADDR, &|interface| {
                    interface.ifr_ifru.ifru_addr = ipv4(address);
                })?;
                set("the mask", String::new(), libc::SIOCSIFNETMASK, &|interface| {
                    interface.ifr_ifru.ifru_netmask = ipv4(mask);
                })?;
            }
            Some(HostAddress::V6(address, prefix_len)) => {
                add_ipv6(&self.name, address, prefix_len)
                    .map_err(self.failed("the IPv6 address"))?;
            }
            None => {}
        }
        let found = get("the MTU", libc::SIOCGIFMTU)?;
        // SAFETY: the kernel has filled this member of the union.
        let mut mtu = unsafe { found.ifr_ifru.ifru_mtu };
        if let Some(wanted) = options.mtu.map(c_int::from)
            && wanted != mtu
        {
            set(
                "the MTU",
                format!("link set dev {name} mtu {wanted}"),
                libc::SIOCSIFMTU,
                &|interface| {
                    interface.ifr_ifru.ifru_mtu = wanted;
                },
            )?;
            mtu = wanted;
        }
        let found = get("the state", libc::SIOCGIFFLAGS)?;
        // SAFETY: as above.
        let flags = unsafe { found.ifr_ifru.ifru_flags };
        if c_int::from(flags) & libc::IFF_UP == 0 {
            set(
                "the state up",
                format!("link set dev {name} up"),
                libc::SIOCSIFFLAGS,
                &|interface| {
                    interface.ifr_ifru.ifru_flags = flags | libc::IFF_UP as c_short;
                },
            )?;
        }
        self.mtu = u16::try_from(mtu).ok();
        Ok(())
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Maximum payload of a frame. `None` if it is unknown.
    pub fn mtu(&self) -> Option<u16> {
        self.mtu
    }
}

/// Parses the traffic of the interface `name` from /proc/net/dev (proc(5)). Frames that the
/// interface has received were sent by the guest, and vice versa. Each direction has eight
/// counters, and the first two are bytes and packets.
fn counters(interfaces: &str, name: &str) -> Option<[Traffic; 2]> {
    let of = |line: &'_ str| {
        let (of, values) = line.split_once(':')?;
        (of.trim() == name).then(|| {
            values.split_whitespace().map(str::parse::<u64>).collect::<Result<Vec<_>, _>>()
        })
    };
    let values = interfaces.lines().find_map(of)?.ok()?;
    let traffic =
        |at: usize| Some(Traffic { bytes: *values.get(at)?, frames: *values.get(at + 1)? });
    Some([traffic(0)?, traffic(8)?])
}

impl HostInterface for Tap {
    fn file(&self, pair: u16) -> io::Result<File> {
        self.queues[usize::from(pair)].try_clone()
    }

    fn exists(&self) -> bool {
        call(&self.queues[0], libc::TUNGETIFF, &mut named("")).is_ok()
    }

    fn traffic(&self) -> Option<[Traffic; 2]> {
        if !self.is_ours {
            return None;
        }
        // This file shows the network namespace of the thread. /sys/class/net would show the
        // namespace in which it was mounted.
        counters(&fs::read_to_string("/proc/thread-self/net/dev").ok()?, &self.name)
    }

    fn queue(&self, pair: u16) -> io::Result<Box<dyn HostQueue>> {
        let queue = &self.queues[usize::from(pair)];
        Ok(Box::new(TapQueue { input: queue.try_clone()?, output: queue.try_clone()? }))
    }

    fn set_offloads(&self, offloads: Offloads) -> io::Result<()> {
        let Offloads { csum, tso4, tso6, ecn, ufo } = offloads;
        let flags = [
            (csum, libc::TUN_F_CSUM),
            (tso4, libc::TUN_F_TSO4),
            (tso6, libc::TUN_F_TSO6),
            (ecn, libc::TUN_F_TSO_ECN),
            (ufo, libc::TUN_F_UFO),
        ];
        let flags = flags.iter().filter(|(on, _)| *on).fold(0, |all, (_, flag)| all | flag);
        let queue = self.queues[0].as_raw_fd();
        // SAFETY: the argument is a number.
        check(unsafe { libc::ioctl(queue, libc::TUNSETOFFLOAD, c_ulong::from(flags)) })
    }

    fn set_pairs(&self, pairs: u16) -> io::Result<()> {
        let mut attached = self.attached.lock();
        let set = |nth: u16, flag: c_int| set_queue(&self.queues[usize::from(nth)], flag);
        while *attached > pairs {
            set(*attached - 1, IFF_DETACH_QUEUE)?;
            *attached -= 1;
        }
        while *attached < pairs {
            set(*attached, IFF_ATTACH_QUEUE)?;
            *attached += 1;
        }
        Ok(())
    }
}

struct TapQueue {
    input: File,
    output: File,
}

impl HostQueue for TapQueue {
    fn receive(&mut self, packet: &mut [u8]) -> io::Result<usize> {
        self.input.read(packet)
    }

    fn send(&mut self, packet: &[u8]) -> io::Result<()> {
        // The kernel accepts a frame completely or not at all.
        self.output.write(packet).map(|_| ())
    }

    fn input(&self) -> RawFd {
        self.input.as_raw_fd()
    }

    fn output(&self) -> RawFd {
        self.output.as_raw_fd()
    }
}

fn exists(name: &str) -> bool {
    // SAFETY: the string ends with a zero and outlives the call.
    CString::new(name).is_ok_and(|name| unsafe { libc::if_nametoindex(name.as_ptr()) } != 0)
}

/// Attaches a queue to the interface `name`. Returns the queue and the interface's actual name.
fn attach(name: &str, flags: c_int) -> Result<(File, String), TapError> {
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC);
    let file = options.open(DEVICE).map_err(TapError::Open)?;
    let mut interface = named(name);
    interface.ifr_ifru.ifru_flags = (IFF_TAP | IFF_NO_PI | IFF_VNET_HDR | flags) as c_short;
    call(&file, libc::TUNSETIFF, &mut interface).map_err(|source| {
        let hint = match source.raw_os_error() {
            Some(libc::EPERM) => {
                ": creating one needs CAP_NET_ADMIN; create it for this user, name it in --net at the start, or pass it as fd="
            }
            Some(libc::EBUSY) => ": another process uses it",
            Some(libc::EINVAL) => ": it is not a tap, or was created without multi_queue",
            _ => "",
        };
        TapError::Attach { name: name.to_owned(), hint, source }
    })?;
    Ok((file, name_of(&interface)))
}

/// Checks that all descriptors are suitable queues of a single interface. Returns the interface's
/// name and duplicates of the descriptors.
pub fn check_given(given: &[RawFd]) -> Result<(String, Vec<OwnedFd>), TapError> {
    let several = given.len() > 1;
    let (mut name, mut copies) = (String::new(), Vec::with_capacity(given.len()));
    for &fd in given {
        let copy = duplicate(fd)?;
        if several {
            // A VM that used the interface before may have detached the queue. The call fails if
            // the queue is still attached.
            let _ = set_queue(&copy, IFF_ATTACH_QUEUE);
        }
        let found = check_queue(fd, &copy, several)?;
        if !copies.is_empty() && found != name {
            return Err(TapError::Mixed { fd, name: found, first: name });
        }
        name = found;
        copies.push(copy);
    }
    Ok((name, copies))
}

/// Checks one queue and returns the name of its interface. `fd` is the number to use in errors.
fn check_queue(fd: RawFd, queue: &OwnedFd, several: bool) -> Result<String, TapError> {
    let mut interface = named("");
    call(queue, libc::TUNGETIFF, &mut interface)
        .map_err(|source| TapError::NoTap { fd, source })?;
    // SAFETY: the kernel has filled this member of the union.
    let flags = c_int::from(unsafe { interface.ifr_ifru.ifru_flags });
    match lacks(flags, several) {
        Some(lacks) => Err(TapError::Lacks { fd, lacks }),
        None => Ok(name_of(&interface)),
    }
}

/// Returns a description of a flag that is missing or unsuitable. The queue was opened with
/// `flags`.
fn lacks(flags: c_int, several: bool) -> Option<&'static str> {
    match flags {
        _ if flags & IFF_TAP == 0 => Some("as tun, without Ethernet frames"),
        _ if flags & IFF_NO_PI == 0 => Some("without IFF_NO_PI"),
        _ if flags & IFF_VNET_HDR == 0 => Some("without IFF_VNET_HDR"),
        _ if several && flags & IFF_MULTI_QUEUE == 0 => Some("without IFF_MULTI_QUEUE"),
        _ => None,
    }
}

/// Duplicates a descriptor of another program. The original remains open.
fn duplicate(fd: RawFd) -> Result<OwnedFd, TapError> {
    // SAFETY: the descriptor is only duplicated, which fails if it is not open. The program that
    // passed the number must not close and reuse the descriptor in the meantime.
    unsafe { BorrowedFd::borrow_raw(fd) }
        .try_clone_to_owned()
        .map_err(|source| TapError::NoTap { fd, source })
}

/// Attaches or detaches a queue.
fn set_queue(queue: &impl AsRawFd, flag: c_int) -> io::Result<()> {
    let mut interface = named("");
    interface.ifr_ifru.ifru_flags = flag as c_short;
    call(queue, libc::TUNSETQUEUE, &mut interface)
}

fn set_nonblocking(file: &File) -> io::Result<()> {
    Ok(fcntl_setfl(file, fcntl_getfl(file)? | OFlags::NONBLOCK)?)
}

/// Returns a request structure for the interface `name`. A longer name is cut.
fn named(name: &str) -> ifreq {
    // SAFETY: all fields are numbers and arrays of numbers, for which zeros are valid.
    let mut interface: ifreq = unsafe { std::mem::zeroed() };
    let last = interface.ifr_name.len() - 1;
    for (to, from) in interface.ifr_name[..last].iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    interface
}

fn name_of(interface: &ifreq) -> String {
    let bytes = interface.ifr_name.iter().take_while(|byte| **byte != 0).map(|byte| *byte as u8);
    String::from_utf8_lossy(&bytes.collect::<Vec<_>>()).into_owned()
}

fn ethernet(mac: [u8; 6]) -> libc::sockaddr {
    let mut address = libc::sockaddr { sa_family: libc::ARPHRD_ETHER, sa_data: [0; 14] };
    for (to, from) in address.sa_data.iter_mut().zip(mac) {
        *to = from as libc::c_char;
    }
    address
}

/// Returns the address in the layout of `sockaddr_in`: a two-byte port, and the address.
fn ipv4(ip: Ipv4Addr) -> libc::sockaddr {
    let mut address =
        libc::sockaddr { sa_family: libc::AF_INET as libc::sa_family_t, sa_data: [0; 14] };
    for (to, from) in address.sa_data[2..].iter_mut().zip(ip.octets()) {
        *to = from as libc::c_char;
    }
    address
}

/// Adds an IPv6 address to the interface `name`. Unlike the IPv4 calls, the call needs an IPv6
/// socket and the interface's number (ipv6(7), linux/ipv6.h `struct in6_ifreq`).
fn add_ipv6(name: &str, address: Ipv6Addr, prefix_len: u8) -> io::Result<()> {
    // This fails on a host without IPv6.
    let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0))?;
    let mut interface = named(name);
    call(&socket, libc::SIOCGIFINDEX, &mut interface)?;
    let request = in6_ifreq {
        ifr6_addr: libc::in6_addr { s6_addr: address.octets() },
        ifr6_prefixlen: prefix_len.into(),
        // SAFETY: the kernel has filled this member of the union.
        ifr6_ifindex: unsafe { interface.ifr_ifru.ifru_ifindex },
    };
    // SAFETY: on an IPv6 socket, the request reads one `in6_ifreq`.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFADDR, &raw const request) })
}

fn call(file: &impl AsRawFd, request: c_ulong, interface: &mut ifreq) -> io::Result<()> {
    // SAFETY: all requests in this module read and write one `ifreq`.
    check(unsafe { libc::ioctl(file.as_raw_fd(), request, std::ptr::from_mut(interface)) })
}

fn check(result: c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Socket pairs that replace a tap interface in tests.
#[cfg(test)]
pub mod fake {
    use std::os::unix::net::UnixDatagram;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[derive(Clone)]
    pub struct FakeTap {
        queues: Arc<Vec<UnixDatagram>>,
        /// Offloads that were set last.
        pub offloads: Arc<Mutex<Offloads>>,
        pub pairs: Arc<Mutex<u16>>,
        /// Traffic to report.
        pub traffic: Arc<Mutex<Option<[Traffic; 2]>>>,
        pub is_gone: Arc<AtomicBool>,
    }

    impl FakeTap {
        /// Creates an interface with `pairs` queues. Also returns the host's ends of the socket
        /// pairs.
        pub fn new(pairs: u16) -> (Self, Vec<UnixDatagram>) {
            let (ours, theirs): (Vec<_>, Vec<_>) = (0..pairs)
                .map(|_| {
                    let (ours, theirs) = UnixDatagram::pair().unwrap();
                    ours.set_nonblocking(true).unwrap();
                    (ours, theirs)
                })
                .unzip();
            let tap = Self {
                queues: Arc::new(ours),
                offloads: Arc::default(),
                pairs: Arc::new(Mutex::new(pairs)),
                traffic: Arc::default(),
                is_gone: Arc::default(),
            };
            (tap, theirs)
        }
    }

    struct FakeQueue {
        input: UnixDatagram,
        output: UnixDatagram,
    }

    impl HostInterface for FakeTap {
        fn queue(&self, pair: u16) -> io::Result<Box<dyn HostQueue>> {
            let queue = &self.queues[usize::from(pair)];
            Ok(Box::new(FakeQueue { input: queue.try_clone()?, output: queue.try_clone()? }))
        }
        fn file(&self, pair: u16) -> io::Result<File> {
            Ok(OwnedFd::from(self.queues[usize::from(pair)].try_clone()?).into())
        }
        fn exists(&self) -> bool {
            !self.is_gone.load(Ordering::Relaxed)
        }
        fn traffic(&self) -> Option<[Traffic; 2]> {
            *self.traffic.lock()
        }
        fn set_offloads(&self, offloads: Offloads) -> io::Result<()> {
            *self.offloads.lock() = offloads;
            Ok(())
        }
        fn set_pairs(&self, pairs: u16) -> io::Result<()> {
            *self.pairs.lock() = pairs;
            Ok(())
        }
    }

    impl HostQueue for FakeQueue {
        fn receive(&mut self, packet: &mut [u8]) -> io::Result<usize> {
            self.input.recv(packet)
        }
        fn send(&mut self, packet: &[u8]) -> io::Result<()> {
            self.output.send(packet).map(|_| ())
        }
        fn input(&self) -> RawFd {
            self.input.as_raw_fd()
        }
        fn output(&self) -> RawFd {
            self.output.as_raw_fd()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_that_are_not_taps_are_refused() {
        let file = tempfile::tempfile().unwrap();
        let fd = file.as_raw_fd();
        assert!(
            matches!(Tap::from_fds(&[fd], None), Err(TapError::NoTap { fd: found, .. }) if found == fd)
        );
        assert!(matches!(check_given(&[i32::MAX]), Err(TapError::NoTap { fd: i32::MAX, .. })));
    }

    /// Creates a persistent interface that the current user may attach to.
    fn make_persistent(name: &str) -> Result<(), TapError> {
        let (queue, _) = attach(name, 0)?;
        // SAFETY: takes no pointer.
        let user = unsafe { libc::geteuid() };
        for (request, value) in [(libc::TUNSETOWNER, c_ulong::from(user)), (libc::TUNSETPERSIST, 1)]
        {
            // SAFETY: the arguments of both calls are numbers.
            check(unsafe { libc::ioctl(queue.as_raw_fd(), request, value) }).unwrap();
        }
        Ok(())
    }

    /// Drops all capabilities of this thread.
    fn drop_capabilities() {
        // The header contains _LINUX_CAPABILITY_VERSION_3 of linux/capability.h and 0 for this
        // thread. The data contains the effective, permitted and inheritable sets, in two halves.
        let (header, data) = ([0x2008_0522u32, 0], [0u32; 6]);
        // SAFETY: the kernel reads a header of two numbers and data of six.
        check(unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), data.as_ptr()) } as c_int)
            .unwrap();
    }

    /// The test runs in its own network namespace.
    #[test]
    fn unprivileged_settings_must_match_or_the_error_has_the_command() {
        let thread = std::thread::spawn(|| {
            // SAFETY: the call takes a number and changes only the namespace of this thread.
            if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 || make_persistent("down").is_err()
            {
                return eprintln!("skipped: cannot create an interface (needs root)");
            }
            make_persistent("up").unwrap();
            let open = |name: &str, options: TapOptions| {
                Tap::open(&TapOptions { name: Some(name.to_owned()), pairs: 1, ..options })
            };
            let host_mac = Some([2, 0, 0, 0, 0, 7]);
            open("up", TapOptions { host_mac, mtu: Some(2000), ..TapOptions::default() }).unwrap();
            drop_capabilities();
            let same =
                open("up", TapOptions { host_mac, mtu: Some(2000), ..TapOptions::default() })
                    .unwrap();
            assert_eq!(same.mtu(), Some(2000));
            drop(same);
            assert_eq!(open("up", TapOptions::default()).unwrap().mtu(), Some(2000));
            let refused = |name, options| open(name, options).unwrap_err().to_string();
            let expected = |what: &str, name: &str, command: &str| {
                format!(
                    "cannot set {what} of the interface {name}: it needs CAP_NET_ADMIN; without it, run as root \
                     beforehand: ip link set dev {name} {command}"
                )
            };
            let down = refused("down", TapOptions::default());
            assert_eq!(down, expected("the state up", "down", "up"));
            let mtu = refused("up", TapOptions { mtu: Some(9000), ..TapOptions::default() });
            assert_eq!(mtu, expected("the MTU", "up", "mtu 9000"));
            let other_mac = Some([2, 0, 0, 0, 0, 8]);
            let mac = refused("up", TapOptions { host_mac: other_mac, ..TapOptions::default() });
            assert_eq!(mac, expected("the Ethernet address", "up", "address 02:00:00:00:00:08"));
        });
        thread.join().unwrap();
    }

    #[test]
    fn counters_of_an_interface_are_parsed() {
        let interfaces = "\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo: 100 2 0 0 0 0 0 0 300 4 0 0 0 0 0 0
vmtap1:7 8 0 0 0 0 0 0 9 10 0 0 0 0 0 0
vmtap10: 1 1 0 0 0 0 0 0 1 1 0 0 0 0 0 0
 short: 1 1
";
        let traffic = |bytes, frames| Traffic { frames, bytes };
        assert_eq!(counters(interfaces, "vmtap1"), Some([traffic(7, 8), traffic(9, 10)]));
        assert_eq!(counters(interfaces, "lo"), Some([traffic(100, 2), traffic(300, 4)]));
        for none in ["vmtap", "short", "Inter-|", ""] {
            assert_eq!(counters(interfaces, none), None, "{none}");
        }
        assert!(
            counters(&fs::read_to_string("/proc/thread-self/net/dev").unwrap(), "lo").is_some()
        );
    }

    #[test]
    fn missing_flags_of_a_queue_are_found() {
        let all = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR;
        assert_eq!((lacks(all, false), lacks(all | IFF_MULTI_QUEUE, true)), (None, None));
        // An interface for several queues is also suitable if only one queue is used.
        assert_eq!(lacks(all | IFF_MULTI_QUEUE, false), None);
        assert_eq!(lacks(all, true), Some("without IFF_MULTI_QUEUE"));
        assert_eq!(lacks(all & !IFF_VNET_HDR, false), Some("without IFF_VNET_HDR"));
        assert_eq!(lacks(all & !IFF_NO_PI, false), Some("without IFF_NO_PI"));
        assert!(
            lacks(libc::IFF_TUN | IFF_NO_PI | IFF_VNET_HDR, false).unwrap().starts_with("as tun")
        );
    }

    #[test]
    fn requests_have_the_layout_of_the_kernel() {
        let interface = named("a-name-of-15-byt-and-more");
        assert_eq!(name_of(&interface), "a-name-of-15-by");
        let address = ipv4([10, 1, 2, 3].into());
        assert_eq!(
            (i32::from(address.sa_family), &address.sa_data[..6]),
            (2, &[0, 0, 10, 1, 2, 3][..])
        );
        assert_eq!(ethernet([2, 0, 0, 0, 0, 9]).sa_data[..6], [2, 0, 0, 0, 0, 9]);
    }

    /// The test runs in its own network namespace. It is skipped without the privilege to create
    /// one, or without IPv6. The namespace contains only lo, to which addresses can be added as to
    /// a tap.
    #[test]
    fn ipv6_address_is_added() {
        let thread = std::thread::spawn(|| {
            // SAFETY: the call changes only the namespace of this thread, which ends with the
            // thread.
            if let Err(error) = check(unsafe { libc::unshare(libc::CLONE_NEWNET) }) {
                return eprintln!("skipped: no network namespace: {error}");
            }
            if !fs::exists("/proc/thread-self/net/if_inet6").unwrap() {
                return eprintln!("skipped: no IPv6");
            }
            add_ipv6("lo", "fd00::1234".parse().unwrap(), 72).unwrap();
            let addresses = fs::read_to_string("/proc/thread-self/net/if_inet6").unwrap();
            // The line begins with the address, the interface's number and the prefix length, in
            // hexadecimal.
            let expected = "fd000000000000000000000000001234 01 48 ";
            assert!(addresses.lines().any(|line| line.starts_with(expected)), "{addresses}");
            let again = add_ipv6("lo", "fd00::1234".parse().unwrap(), 72).unwrap_err();
            assert_eq!(again.raw_os_error(), Some(libc::EEXIST));
            let missing = add_ipv6("none", Ipv6Addr::LOCALHOST, 128).unwrap_err();
            assert_eq!(missing.raw_os_error(), Some(libc::ENODEV));
            let too_long = add_ipv6("lo", "fd00::2".parse().unwrap(), 129).unwrap_err();
            assert_eq!(too_long.raw_os_error(), Some(libc::EINVAL));
            let made = TapOptions {
                name: Some("made".to_owned()),
                pairs: 1,
                address: Some(HostAddress::V6("fd00::5678".parse().unwrap(), 64)),
                ..TapOptions::default()
            };
            let _tap = match Tap::open(&made) {
                Err(error @ TapError::Open(_)) => {
                    return eprintln!("skipped: no tap interface: {error}");
                }
                tap => tap.unwrap(),
            };
            let addresses = fs::read_to_string("/proc/thread-self/net/if_inet6").unwrap();
            let is_made = |line: &str| {
                line.starts_with("fd000000000000000000000000005678 ")
                    && line.contains(" 40 ")
                    && line.ends_with(" made")
            };
            assert!(addresses.lines().any(is_made), "{addresses}");
        });
        thread.join().unwrap();
    }
}
