//! `--net`.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use foreshore_config::refused_keys as refused;
use foreshore_config::{
    ConfigError, Item, JsonError, JsonValue, Refused, Walk, digits, name, section, text_value,
    words,
};
use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::virtio::transport::pci::layout::QUEUES_MAX;

const REFUSED: &[Refused] =
    &[Refused { key: "vhost_mode", neutral: &["client"], why: refused::NO_VHOST_USER }];

/// Refuses `fds` in JSON unless it is a list of numbers. Such a list is ignored.
const FDS: Refused = Refused {
    key: "fds",
    neutral: &[],
    why: "JSON cannot carry file descriptors; send them with vm.add-net as SCM_RIGHTS, or use --net fd=",
};

/// Number of descriptors in a queue. Linux's driver stops a queue that has no room for 19
/// descriptors: the maximum number of fragments in a frame plus two. It would never restart a queue
/// that is smaller than that. The upper limit is that of virtio.
const QUEUE_SIZES: RangeInclusive<u16> = 32..=1 << 15;
/// Minimum MTU of IPv6, which is also the limit in Cloud Hypervisor.
const MIN_MTU: u16 = 1280;
const IPV6_BITS: u32 = 128;
/// Maximum length of an interface's name, without the terminating zero.
const MAX_TAP_BYTES: usize = 15;

const FDS_IGNORED: &str = "--net: fds in JSON are ignored, because they are not descriptors of this process; \
     tap names the interface instead; send descriptors with vm.add-net as SCM_RIGHTS";

words! {
    /// Use of vhost-net, with which the host's kernel transfers frames.
    pub enum VhostMode {
        /// This process transfers frames.
        Off = "off" "off",
        /// The kernel transfers frames. If it cannot, the device is refused.
        On = "on" "on",
        /// The kernel transfers frames if it can.
        Auto = "auto" "auto",
    }
}

/// IP address of the host on an interface, with the network that it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostAddress {
    /// IPv4 address and network mask.
    V4(Ipv4Addr, Ipv4Addr),
    /// IPv6 address and length of the network prefix.
    V6(Ipv6Addr, u8),
}

impl HostAddress {
    /// Combines `ip` and `mask`. Returns the reason if they are invalid.
    fn new(ip: IpAddr, mask: IpAddr) -> Result<Self, String> {
        match (ip, mask) {
            (IpAddr::V4(ip), IpAddr::V4(mask)) => Ok(Self::V4(ip, mask)),
            (IpAddr::V6(ip), IpAddr::V6(mask)) => {
                prefix_len(mask).map(|prefix_len| Self::V6(ip, prefix_len)).ok_or_else(|| {
                    format!("mask is {mask}, which is not a prefix of ones followed by zeros")
                })
            }
            _ => Err(format!("ip is {ip} and mask is {mask}; both must be IPv4 or both IPv6")),
        }
    }
}

/// Returns the length of the prefix. Returns `None` if the mask is not a sequence of ones followed
/// by zeros.
fn prefix_len(mask: Ipv6Addr) -> Option<u8> {
    let bits = mask.to_bits();
    let ones = bits.leading_ones();
    (ones + bits.trailing_zeros() >= IPV6_BITS).then(|| u8::try_from(ones).expect("at most 128"))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MacAddress([u8; 6]);

impl MacAddress {
    pub fn bytes(self) -> [u8; 6] {
        self.0
    }

    /// Creates a locally administered unicast address (IEEE 802, 8.2.2) from random bytes.
    pub fn local(drawn: [u8; 6]) -> Self {
        let mut bytes = drawn;
        bytes[0] = bytes[0] & !3 | 2;
        Self(bytes)
    }

    fn is_of_one_station(self) -> bool {
        self.0[0] & 1 == 0 && self.0 != [0; 6]
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl Serialize for MacAddress {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

text_value!(MacAddress, "MAC", "six hexadecimal bytes separated by colons", |text| {
    let mut bytes = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut bytes {
        let part = parts.next().filter(|part| part.len() == 2 && part.is_ascii())?;
        *byte = u8::from_str_radix(part, 16).ok()?;
    }
    (parts.next().is_none() && !text.contains('+')).then_some(MacAddress(bytes))
});

/// Descriptor of a tap interface's queue that another program has opened. In JSON the number is
/// replaced with -1, because it is valid only in this process.
#[derive(Clone, Debug)]
pub struct GivenFd {
    number: RawFd,
    /// Owned descriptor, closed together with the last copy of this configuration. `None` if the
    /// number is from the command line and the descriptor is not owned yet.
    held: Option<Arc<OwnedFd>>,
}

impl GivenFd {
    /// Refers to a descriptor by number without owning it.
    pub fn named(number: RawFd) -> Self {
        Self { number, held: None }
    }

    pub fn number(&self) -> RawFd {
        self.number
    }

    /// Returns true if this configuration owns the descriptor and closes it.
    pub fn is_held(&self) -> bool {
        self.held.is_some()
    }
}

impl From<OwnedFd> for GivenFd {
    fn from(fd: OwnedFd) -> Self {
        Self { number: fd.as_raw_fd(), held: Some(Arc::new(fd)) }
    }
}

/// Comparing the numbers suffices, because no two open descriptors have the same number.
impl PartialEq for GivenFd {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for GivenFd {}

impl Serialize for GivenFd {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_i32(-1)
    }
}

impl JsonValue for GivenFd {
    fn from_json(json: Value, walk: &mut Walk) -> Result<Self, JsonError> {
        Err(walk.wrong(&json, "a descriptor sent with the request"))
    }
}

impl Item for GivenFd {
    const SYNTAX: &'static str = "[N,N]";
    const EXPECTED: &'static str = "a descriptor, or several as [3,4]";

    fn read_item(text: &str) -> Option<Vec<Self>> {
        digits(text).map(|number| vec![Self::named(number)])
    }
}

section! {
    /// Network interface.
    pub struct NetConfig: "--net"
        "Network interfaces, each a tap of the host that exists, is created, or is passed open" {
        tap: Option<String> => "Host interface, instead of vmtap0 and so on",
        ip: Option<IpAddr> => "Host address on a created interface",
        mask (syntax ("MASK")): Option<IpAddr>
            => "Network mask, of the same family as ip; for IPv6 a prefix",
        mac: Option<MacAddress> => "Guest Ethernet address, instead of a random one",
        host_mac: Option<MacAddress> => "Host Ethernet address",
        mtu (range (MIN_MTU..=u16::MAX)): Option<u16>
            => "Largest payload of a frame, instead of the interface's",
        fds (flag "fd" with fds_from_json): Vec<GivenFd> => "Descriptors of an open tap, one for each queue pair",
        num_queues: u16 = 2 => "Queues, two for each pair",
        queue_size (range (QUEUE_SIZES)): u16 = 256 => "Descriptors of each queue",
        id: Option<String> => "Name in the API and in metrics, instead of _net0 and so on",
        offload_tso: bool = true => "Let TCP segments be longer than frames",
        offload_ufo: bool = true => "Let UDP datagrams be longer than frames",
        offload_csum: bool = true => "Leave checksums to the other side; required by offload_tso and offload_ufo",
        vhost (skip_default): VhostMode = VhostMode::Off => "Let the host's kernel transfer frames",
    }
    refused &[refused::PCI, refused::SLOT, refused::VHOST_USER, refused::RATE_LIMITS, REFUSED];
}

/// Ignores descriptor numbers with a warning, because they do not refer to files of this process.
/// `vm.info` returns -1 instead of these numbers, and clients send that value back. Cloud
/// Hypervisor ignores them as well.
fn fds_from_json(json: Value, walk: &mut Walk) -> Result<Vec<GivenFd>, JsonError> {
    let is_number =
        |value: &Value| value.as_i64().is_some_and(|number| RawFd::try_from(number).is_ok());
    match &json {
        Value::Array(numbers) if numbers.iter().all(is_number) => {
            if !numbers.is_empty() {
                walk.warn(FDS_IGNORED);
            }
            Ok(Vec::new())
        }
        _ if FDS.is_neutral_json(&json) => Ok(Vec::new()),
        _ => Err(FDS.error(NetConfig::FLAG, format!("={json}")).into()),
    }
}

impl NetConfig {
    /// Kind of the device in ids and metrics.
    pub const KIND: &'static str = "net";

    /// Maximum number of queue pairs in a device with a control queue. Each pair may have its own
    /// descriptor.
    pub const MAX_PAIRS: u16 = (QUEUES_MAX - 1) / 2;

    /// Checks the number of queues and the interface settings. A device may have at most `vcpus`
    /// queue pairs.
    pub fn validate(&self, vcpus: u8) -> Result<(), ConfigError> {
        let flag = Self::FLAG;
        let conflict = |reason: String| Err(ConfigError::Conflict { flag, reason });
        let most = 2 * u16::from(vcpus).min(Self::MAX_PAIRS);
        if !(2..=most).contains(&self.num_queues) {
            return Err(ConfigError::QueueCount {
                flag,
                value: self.num_queues,
                least: 2,
                most,
                why: format!(
                    "at most a pair for each vCPU and {} pairs, and --cpus has {vcpus}",
                    Self::MAX_PAIRS
                ),
            });
        }
        if !self.num_queues.is_multiple_of(2) {
            return conflict(format!(
                "num_queues is {}, and must be even: each pair has two",
                self.num_queues
            ));
        }
        self.check_ranges()?;
        if !self.queue_size.is_power_of_two() {
            return conflict(format!(
                "queue_size is {}, which is not a power of two",
                self.queue_size
            ));
        }
        self.id.as_ref().map_or(Ok(()), |id| name::check(flag, "id", id))?;
        for (key, mac) in [("mac", self.mac), ("host_mac", self.host_mac)] {
            if let Some(mac) = mac.filter(|mac| !mac.is_of_one_station()) {
                return conflict(format!("{key} is {mac}, which is not a unicast address"));
            }
        }
        if self.ip.is_some() != self.mask.is_some() {
            return conflict("ip and mask must be given together".to_owned());
        }
        if let Some((ip, mask)) = self.ip.zip(self.mask)
            && let Err(reason) = HostAddress::new(ip, mask)
        {
            return conflict(reason);
        }
        self.check_tap()?;
        self.check_descriptors()
    }

    fn check_tap(&self) -> Result<(), ConfigError> {
        let Some(tap) = &self.tap else { return Ok(()) };
        // Accepts the same names as Linux, except for patterns such as `tap%d`.
        let is_name = !matches!(&**tap, "." | "..")
            && !tap.contains(|c: char| c.is_whitespace() || c.is_control() || "/:%".contains(c));
        if (1..=MAX_TAP_BYTES).contains(&tap.len()) && is_name {
            return Ok(());
        }
        Err(ConfigError::BadValue {
            flag: Self::FLAG,
            key: "tap".to_owned(),
            value: tap.clone(),
            expected: format!("an interface name of at most {MAX_TAP_BYTES} bytes"),
        })
    }

    fn check_descriptors(&self) -> Result<(), ConfigError> {
        let fds = &self.fds;
        let conflict = |reason: String| Err(ConfigError::Conflict { flag: Self::FLAG, reason });
        if fds.is_empty() {
            return Ok(());
        }
        let mut numbers: Vec<RawFd> = fds.iter().map(GivenFd::number).collect();
        if let Some(fd) = numbers.iter().find(|fd| **fd <= libc::STDERR_FILENO) {
            return conflict(format!("fd {fd} is standard input, output or error"));
        }
        numbers.sort_unstable();
        if let Some(twice) = numbers.windows(2).find(|two| two[0] == two[1]) {
            return conflict(format!("fd {} is given twice", twice[0]));
        }
        if fds.len() != usize::from(self.pairs()) {
            let (count, pairs) = (fds.len(), self.pairs());
            return conflict(format!("fd has {count} descriptors, but num_queues needs {pairs}"));
        }
        match self.tap {
            Some(_) => conflict(
                "tap and fd exclude each other: tap names an interface, fd passes an open one"
                    .to_owned(),
            ),
            None => Ok(()),
        }
    }

    /// Returns true if `ip` or `host_mac` is set for an interface that another program has opened.
    /// In that case they have no effect, because that program sets the addresses.
    pub fn is_idle_of_given(&self) -> bool {
        !self.fds.is_empty() && (self.ip.is_some() || self.host_mac.is_some())
    }

    /// Returns the host's IP address on the interface. The configuration must be valid.
    pub fn host_address(&self) -> Option<HostAddress> {
        let (ip, mask) = self.ip.zip(self.mask)?;
        Some(HostAddress::new(ip, mask).expect("validated"))
    }

    /// Number of queue pairs. A pair consists of a receive and a transmit queue.
    pub fn pairs(&self) -> u16 {
        self.num_queues / 2
    }
}

/// Validates all `--net` devices, and checks that no two of them use the same interface.
pub fn validate_all(nets: &[NetConfig], vcpus: u8) -> Result<(), ConfigError> {
    nets.iter().try_for_each(|net| net.validate(vcpus))?;
    let conflict = |reason| Err(ConfigError::Conflict { flag: NetConfig::FLAG, reason });
    for (nth, net) in nets.iter().enumerate() {
        let earlier = &nets[..nth];
        if let Some(tap) = &net.tap
            && earlier.iter().any(|other| other.tap.as_ref() == Some(tap))
        {
            return conflict(format!("two devices use the interface {tap}"));
        }
        if let Some(fd) =
            net.fds.iter().find(|fd| earlier.iter().any(|other| other.fds.contains(fd)))
        {
            return conflict(format!("fd {} is given twice", fd.number()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use foreshore_config::FlagValue;
    use foreshore_config::read_body;

    fn error(text: &str) -> String {
        NetConfig::parse(text).and_then(|net| net.validate(4)).unwrap_err().to_string()
    }

    #[test]
    fn flag_is_parsed() {
        let net = NetConfig::parse(
            "tap=tap0,ip=10.0.0.1,mask=255.255.255.0,mac=02:00:00:00:00:0a,host_mac=02:00:00:00:00:0B,mtu=9000,\
             num_queues=4,queue_size=1024,id=lan,offload_tso=off,offload_ufo=off,offload_csum=off,iommu=off,\
             vhost_user=false,vhost_mode=client,vhost=auto",
        )
        .unwrap();
        let expected = NetConfig {
            tap: Some("tap0".to_owned()),
            ip: Some(IpAddr::from([10, 0, 0, 1])),
            mask: Some(IpAddr::from([255, 255, 255, 0])),
            mac: Some(MacAddress([2, 0, 0, 0, 0, 10])),
            host_mac: Some(MacAddress([2, 0, 0, 0, 0, 11])),
            mtu: Some(9000),
            fds: Vec::new(),
            num_queues: 4,
            queue_size: 1024,
            id: Some("lan".to_owned()),
            offload_tso: false,
            offload_ufo: false,
            offload_csum: false,
            vhost: VhostMode::Auto,
        };
        assert_eq!(net, expected);
        assert!(net.validate(4).is_ok());
        let json = serde_json::to_string(&net).unwrap();
        assert!(json.contains(r#""mac":"02:00:00:00:00:0a""#), "{json}");
        assert_eq!(serde_json::from_str::<NetConfig>(&json).unwrap(), net);
    }

    #[test]
    fn unset_keys_have_the_defaults_of_cloud_hypervisor() {
        let net = NetConfig::parse("tap=,mac=,ip=,mask=").unwrap();
        assert_eq!(
            (&net.tap, net.ip, net.mask, net.mtu, &net.id),
            (&None, None, None, None, &None)
        );
        assert_eq!((net.num_queues, net.queue_size), (2, 256));
        assert!(net.offload_tso && net.offload_ufo && net.offload_csum && net.validate(1).is_ok());
        let json: NetConfig = serde_json::from_str("{}").unwrap();
        assert_eq!((json, net.mac), (net.clone(), None));
    }

    #[test]
    fn host_address_may_be_ipv4_or_ipv6() {
        let read = |text: &str| {
            let net = NetConfig::parse(text).unwrap();
            assert!(net.validate(1).is_ok(), "{text}");
            let json = serde_json::to_string(&net).unwrap();
            assert_eq!(serde_json::from_str::<NetConfig>(&json).unwrap(), net, "{json}");
            net.host_address()
        };
        let v4 = HostAddress::V4(Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(255, 0, 0, 0));
        assert_eq!(read("ip=10.0.0.1,mask=255.0.0.0"), Some(v4));
        let v6 = HostAddress::V6("fd00::1".parse().unwrap(), 64);
        assert_eq!(read("ip=fd00::1,mask=ffff:ffff:ffff:ffff::"), Some(v6));
        assert_eq!(read("tap=a"), None);
        // Clients of Cloud Hypervisor use this format.
        let json = serde_json::json!({"ip": "fd00::1", "mask": "ffff:ffff:ffff:ffff:0:0:0:0"});
        assert_eq!(serde_json::from_value::<NetConfig>(json).unwrap().host_address(), Some(v6));
    }

    #[test]
    fn only_prefix_masks_have_a_length() {
        for len in 0..=128u8 {
            let bits = u128::MAX.checked_shl(u32::from(128 - len)).unwrap_or(0);
            assert_eq!(prefix_len(Ipv6Addr::from_bits(bits)), Some(len));
        }
        for mask in ["::1", "ff00:ff00::", "0:ffff::", "ffff:ffff:ffff:ffff::1", "7fff::"] {
            assert_eq!(prefix_len(mask.parse().unwrap()), None, "{mask}");
        }
    }

    #[test]
    fn vhost_mode_is_parsed() {
        for (word, mode) in
            [("off", VhostMode::Off), ("on", VhostMode::On), ("auto", VhostMode::Auto)]
        {
            let net = NetConfig::parse(&format!("vhost={word}")).unwrap();
            assert_eq!(net.vhost, mode);
            let json: NetConfig =
                serde_json::from_value(serde_json::json!({"vhost": word})).unwrap();
            assert_eq!(json, net);
        }
        // The key is omitted if it is not set, because clients of Cloud Hypervisor do not know it.
        assert_eq!(serde_json::to_value(NetConfig::parse("").unwrap()).unwrap().get("vhost"), None);
        assert!(error("vhost=true").contains("off, on or auto"));
        assert!(serde_json::from_str::<NetConfig>(r#"{"vhost": true}"#).is_err());
    }

    #[test]
    fn random_address_is_local_and_unicast() {
        for first in 0..=u8::MAX {
            let mac = MacAddress::local([first, 1, 2, 3, 4, 5]);
            assert_eq!((mac.bytes()[0] & 3, mac.bytes()[0] & !3), (2, first & !3));
            assert!(mac.is_of_one_station());
        }
    }

    #[test]
    fn json_has_only_the_number_of_descriptors() {
        let net = NetConfig::parse("fd=[30,70],num_queues=4,ip=10.0.0.1,mask=255.0.0.0").unwrap();
        assert!(net.validate(2).is_ok() && net.is_idle_of_given());
        let json = serde_json::to_value(&net).unwrap();
        assert_eq!(
            (&json["fds"], &json["ip"]),
            (&serde_json::json!([-1, -1]), &serde_json::json!("10.0.0.1"))
        );
        assert_eq!(serde_json::from_value::<NetConfig>(json).unwrap().fds, []);
        assert_eq!(
            serde_json::to_value(NetConfig::parse("tap=a").unwrap()).unwrap().get("fds"),
            None
        );
    }

    #[test]
    fn only_numbers_of_descriptors_in_json_are_ignored() {
        let read = |fds: Value| {
            let body = serde_json::json!({"id": "n", "fds": fds}).to_string();
            read_body::<NetConfig>(body.as_bytes())
                .map(|(net, warnings)| (net.fds.len(), warnings.len()))
        };
        for numbers in [serde_json::json!([-1]), serde_json::json!([3, -1, 2_147_483_647])] {
            assert_eq!(read(numbers), Ok((0, 1)));
        }
        for nothing in [Value::Null, serde_json::json!([])] {
            assert_eq!(read(nothing), Ok((0, 0)));
        }
        for other in [
            serde_json::json!(3),
            serde_json::json!(["3"]),
            serde_json::json!([3, 0.5]),
            serde_json::json!([2_147_483_648_u64]),
        ] {
            assert!(
                read(other).unwrap_err().to_string().contains("JSON cannot carry file descriptors")
            );
        }
    }

    #[test]
    fn descriptors_are_parsed_alone_and_in_a_list() {
        let numbers = |net: &NetConfig| net.fds.iter().map(GivenFd::number).collect::<Vec<_>>();
        assert_eq!(numbers(&NetConfig::parse("fd=3").unwrap()), [3]);
        let net = NetConfig::parse("fd=[3,7],num_queues=4").unwrap();
        assert_eq!(numbers(&net), [3, 7]);
        assert!(net.validate(2).is_ok());
        assert!(numbers(&NetConfig::parse("fd=[]").unwrap()).is_empty());
        for text in ["fd=[3,", "fd=-1", "fd=x", "fd=[3,,4]"] {
            assert!(NetConfig::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn errors_name_flag_value_and_bound() {
        assert_eq!(
            error("num_queues=3"),
            "--net: num_queues is 3, and must be even: each pair has two"
        );
        assert_eq!(
            error("num_queues=10"),
            "--net: num_queues is 10, and must be 2 to 8: at most a pair for each vCPU and 127 pairs, and --cpus has 4"
        );
        assert_eq!(error("queue_size=16"), "--net: queue_size is 16, and must be 32 to 32768");
        assert_eq!(
            error("queue_size=100"),
            "--net: queue_size is 100, which is not a power of two"
        );
        assert_eq!(error("mtu=1000"), "--net: mtu is 1000, and must be 1280 to 65535");
        assert!(error("mac=01:00:00:00:00:00").contains("not a unicast address"));
        assert!(error("host_mac=00:00:00:00:00:00").contains("not a unicast address"));
        assert!(error("mac=1:2:3:4:5:6").contains("six hexadecimal bytes"));
        assert!(error("ip=10.0.0.1").contains("together"));
        assert!(error("ip=10.0.0,mask=255.0.0.0").contains("not an IPv4 or IPv6 address"));
        assert!(error("ip=fe80::1,mask=64").contains("not an IPv4 or IPv6 address"));
        assert!(error("ip=fe80::1").contains("together"));
        let mixed = "ip is fe80::1 and mask is 255.0.0.0; both must be IPv4 or both IPv6";
        assert!(error("ip=fe80::1,mask=255.0.0.0").contains(mixed));
        assert!(error("ip=10.0.0.1,mask=ffff::").contains("both IPv6"));
        assert!(
            error("ip=fe80::1,mask=ffff:0:ffff::")
                .contains("mask is ffff:0:ffff::, which is not a prefix")
        );
        assert!(error("fd=2").contains("standard"));
        assert!(error("fd=[3,3],num_queues=4").contains("twice"));
        assert!(error("fd=[3,4]").contains("num_queues needs 1"));
        assert!(error("fd=3,tap=tap0").contains("tap and fd exclude each other"));
        for tap in ["a b", "a/b", "..", "tap%d", &"t".repeat(16)] {
            assert!(error(&format!("tap={tap}")).contains("at most 15 bytes"), "{tap}");
        }
        assert!(error("vhost_user=on,socket=/s").contains("vhost-user is not implemented"));
        assert!(error("bw_size=1000").contains("rate limits are not implemented"));
    }

    #[test]
    fn devices_share_no_interface() {
        let all = |texts: &[&str]| {
            let nets: Vec<_> = texts.iter().map(|text| NetConfig::parse(text).unwrap()).collect();
            validate_all(&nets, 4).map_err(|error| error.to_string())
        };
        assert_eq!(all(&["id=", "id=", "tap=a", "tap=b", "fd=3", "fd=4"]), Ok(()));
        assert!(all(&["tap=a", "tap=a"]).unwrap_err().contains("the interface a"));
        assert!(all(&["fd=3", "fd=3"]).unwrap_err().contains("fd 3"));
    }

    proptest! {
        #[test]
        fn displayed_address_is_parsed_to_the_same_value(bytes: [u8; 6]) {
            let mac = MacAddress(bytes);
            prop_assert_eq!(MacAddress::read(&mac.to_string()), Some(mac));
        }

        #[test]
        fn no_text_panics(text in "[0-9a-f:+ü]{0,20}") {
            if let Some(mac) = MacAddress::read(&text) {
                prop_assert_eq!(mac.to_string(), text.to_lowercase());
            }
        }
    }
}
