//! Devices with IDs, which can be added to and removed from a VM.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;

use foreshore_config::{ConfigError, JsonError, Object, Walk};
use foreshore_devices::device::Switch;
use foreshore_devices::memory::zone::device_id;
use serde_json::{Map, Value};

use super::{
    BalloonConfig, DRAM_ZONE, DiskConfig, GivenFd, MacAddress, MemoryZoneConfig, NetConfig,
    PmMemoryConfig, PmVolumeConfig, PmemConfig, SWITCHES, VmConfig, VsockConfig,
};

/// Sections for one kind of device in a [`VmConfig`]: a list, or at most one section.
trait Sections<T> {
    /// Adds a section. Returns false if the VM already has the only section of this kind.
    fn put(&mut self, section: T) -> bool;

    fn retain_if(&mut self, stays: impl Fn(&T) -> bool);
}

impl<T> Sections<T> for Vec<T> {
    fn put(&mut self, section: T) -> bool {
        self.push(section);
        true
    }

    fn retain_if(&mut self, stays: impl Fn(&T) -> bool) {
        self.retain(stays);
    }
}

impl<T> Sections<T> for Option<T> {
    fn put(&mut self, section: T) -> bool {
        let has_room = self.is_none();
        self.get_or_insert(section);
        has_room
    }

    fn retain_if(&mut self, stays: impl Fn(&T) -> bool) {
        self.take_if(|section| !stays(section));
    }
}

/// Generates [`DeviceConfig`] and all code that depends on the kind of device. Each kind has a
/// section and a field of [`VmConfig`]. `KIND` of the section is the name of the kind in IDs and
/// metrics.
macro_rules! removable {
    ($($(#[$doc:meta])* $Kind:ident($Config:ty) in $field:ident,)*) => {
        /// Device that can be added to a VM and removed from it.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum DeviceConfig {
            $($(#[$doc])* $Kind($Config),)*
            /// Volume that is added by `vm.add-pm-volume`. Its ID is derived from its name.
            Volume(PmVolumeConfig),
        }

        impl DeviceConfig {
            /// Kinds of devices, each in one word.
            pub const KINDS: &'static [&'static str] = &[$(<$Config>::KIND,)* PmVolumeConfig::KIND];

            /// Kind of device in one word.
            pub fn kind(&self) -> &'static str {
                match self {
                    $(Self::$Kind(_) => <$Config>::KIND,)*
                    Self::Volume(_) => PmVolumeConfig::KIND,
                }
            }

            fn flag(&self) -> &'static str {
                match self {
                    $(Self::$Kind(_) => <$Config>::FLAG,)*
                    Self::Volume(_) => PmVolumeConfig::FLAG,
                }
            }

            /// ID in the section. `None` for a volume, whose ID is derived from its name.
            fn id_mut(&mut self) -> Option<&mut Option<String>> {
                match self {
                    $(Self::$Kind(section) => Some(&mut section.id),)*
                    Self::Volume(_) => None,
                }
            }
        }

        impl VmConfig {
            /// Kinds and IDs of the removable devices.
            fn removable_ids_mut(&mut self) -> Vec<(&'static str, &mut Option<String>)> {
                let mut ids = Vec::new();
                $(ids.extend(self.$field.iter_mut().map(|section| (<$Config>::KIND, &mut section.id)));)*
                ids
            }

            /// Flags and IDs of the removable devices that have an ID.
            pub fn removable_ids(&self) -> Vec<(&'static str, &str)> {
                let mut ids = Vec::new();
                $(
                    let given = self.$field.iter().filter_map(|section| section.id.as_deref());
                    ids.extend(given.map(|id| (<$Config>::FLAG, id)));
                )*
                ids
            }

            /// Adds a device. Returns false if the VM can have only one device of this kind and
            /// already has it.
            fn put(&mut self, device: DeviceConfig) -> bool {
                match device {
                    $(DeviceConfig::$Kind(section) => self.$field.put(section),)*
                    DeviceConfig::Volume(volume) => self.pm_volumes.put(volume),
                }
            }

            /// Returns the device with this ID if it is removable.
            pub fn device(&self, id: &str) -> Option<DeviceConfig> {
                $(
                    let found = self.$field.iter().find(|section| section.id.as_deref() == Some(id));
                    if let Some(section) = found {
                        return Some(DeviceConfig::$Kind(section.clone()));
                    }
                )*
                let volume = self.volumes_with_ids().find(|(_, other)| other == id);
                volume.map(|(volume, _)| DeviceConfig::Volume(volume.clone()))
            }

            /// Removes the device with this ID. Returns false if no removable device has this ID.
            pub fn remove_device(&mut self, id: &str) -> bool {
                let device = self.device(id);
                if let Some(DeviceConfig::Volume(removed)) = &device {
                    self.pm_volumes.retain(|volume| volume != removed);
                }
                $(self.$field.retain_if(|section| section.id.as_deref() != Some(id));)*
                device.is_some()
            }
        }
    };
}

removable! {
    /// Disk that is added by `vm.add-disk`.
    Disk(DiskConfig) in disks,
    /// Network interface that is added by `vm.add-net`.
    Net(NetConfig) in net,
    /// Persistent memory device that is added by `vm.add-pmem`.
    Pmem(PmemConfig) in pmem,
    /// Vsock device that is added by `vm.add-vsock`.
    Vsock(VsockConfig) in vsock,
}

/// Parsed device and warnings about it.
type Warned = (DeviceConfig, Vec<String>);

impl DeviceConfig {
    pub fn disk(json: Map<String, Value>) -> Result<Warned, JsonError> {
        read(json, Self::Disk)
    }

    /// Reads a network interface whose queues use the descriptors `fds`. Descriptor numbers in the
    /// JSON are ignored.
    pub fn net(json: Map<String, Value>, fds: Vec<OwnedFd>) -> Result<Warned, JsonError> {
        read(json, |mut net: NetConfig| {
            net.fds = fds.into_iter().map(GivenFd::from).collect();
            Self::Net(net)
        })
    }

    pub fn pmem(json: Map<String, Value>) -> Result<Warned, JsonError> {
        read(json, Self::Pmem)
    }

    pub fn pm_volume(json: Map<String, Value>) -> Result<Warned, JsonError> {
        read(json, Self::Volume)
    }

    pub fn vsock(json: Map<String, Value>) -> Result<Warned, JsonError> {
        read(json, Self::Vsock)
    }
}

/// IDs of devices that each VM has at most once.
const FIXED: [&str; 2] = ["__console", "__rng"];

/// Reads a device according to the same rules as in a whole configuration.
fn read<T: Object>(
    json: Map<String, Value>,
    device: impl FnOnce(T) -> DeviceConfig,
) -> Result<Warned, JsonError> {
    let mut walk = Walk::default();
    let config = walk.object(Value::Object(json))?;
    Ok((device(config), walk.into_warnings()))
}

/// Returns the first unused name in the series `_disk0`, `_disk1` and so on.
fn free_name(kind: &str, taken: &[String]) -> String {
    let mut names = (0u32..).map(|nth| format!("_{kind}{nth}"));
    names.find(|name| !taken.contains(name)).expect("fewer devices than numbers")
}

impl VmConfig {
    /// Assigns an ID to every device that does not have one. Unlike indices, IDs do not change when
    /// devices are added and removed.
    pub fn name_devices(&mut self) {
        let mut taken = self.ids();
        let devices = self.removable_ids_mut().into_iter();
        for (kind, id) in devices.filter(|(_, id)| id.is_none()) {
            let name = free_name(kind, &taken);
            taken.push(name.clone());
            *id = Some(name);
        }
    }

    /// Assigns a random MAC address to every interface that does not have one.
    pub fn address_devices(&mut self, mut draw: impl FnMut() -> MacAddress) {
        for net in &mut self.net {
            net.mac.get_or_insert_with(&mut draw);
        }
    }

    /// Configured IDs of devices and memory zones, each with its flag.
    fn named(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let by = |flag| move |id| (flag, id);
        self.removable_ids()
            .into_iter()
            .chain(
                self.balloon
                    .iter()
                    .map(|balloon| balloon.id_or_default())
                    .map(by(BalloonConfig::FLAG)),
            )
            .chain(self.memory.zones.iter().map(|zone| &*zone.id).map(by(MemoryZoneConfig::FLAG)))
            .chain(
                self.pm_memory
                    .iter()
                    .filter_map(|zone| zone.id.as_deref())
                    .map(by(PmMemoryConfig::FLAG)),
            )
    }

    /// IDs that are reserved for Foreshore. The IDs of memory devices are derived from the IDs of
    /// their zones.
    fn ids_of_our_own(&self) -> impl Iterator<Item = String> {
        let one = self.memory.zones.is_empty().then_some(DRAM_ZONE);
        let dram =
            one.into_iter().chain(self.memory.zones.iter().map(|zone| &*zone.id)).map(device_id);
        let pm =
            self.pm_memory.iter().enumerate().map(|(nth, pm)| device_id(&pm.id_or_default(nth)));
        dram.chain(pm).chain(FIXED.map(str::to_owned)).chain(SWITCHES.iter().map(Switch::id))
    }

    /// All IDs except the IDs of volumes.
    pub fn ids_beside_volumes(&self) -> Vec<String> {
        self.named().map(|(_, id)| id.to_owned()).chain(self.ids_of_our_own()).collect()
    }

    /// All IDs, including those of volumes attached as devices.
    fn ids(&self) -> Vec<String> {
        let volumes = self.volumes_with_ids().map(|(_, id)| id);
        self.ids_beside_volumes().into_iter().chain(volumes).collect()
    }

    /// Volumes that are attached as devices, with their IDs.
    fn volumes_with_ids(&self) -> impl Iterator<Item = (&PmVolumeConfig, String)> {
        self.chosen_volumes()
            .filter_map(|(volume, chosen)| Some((volume, chosen.device_id(&volume.name)?)))
    }

    /// Checks that IDs are unique. IDs of volumes are checked once the interfaces of the volumes
    /// are known.
    pub(super) fn check_ids(&self) -> Result<(), ConfigError> {
        let mut earlier: BTreeSet<_> = self.ids_of_our_own().collect();
        match self.named().find(|(_, id)| !earlier.insert((*id).to_owned())) {
            Some((flag, id)) => Err(ConfigError::IdTaken { flag, id: id.to_owned() }),
            None => Ok(()),
        }
    }

    /// Adds a device and returns its ID. `in_use` contains the IDs of devices that the guest has
    /// not released. Such IDs are not reused. After an error, the configuration is unchanged.
    pub fn add_device(
        &mut self,
        mut device: DeviceConfig,
        in_use: &[String],
    ) -> Result<String, ConfigError> {
        let mut config = self.clone();
        config.name_devices();
        let (mut taken, flag, kind) = (config.ids(), device.flag(), device.kind());
        taken.extend_from_slice(in_use);
        let given = device.id_mut().map(|id| id.get_or_insert_with(|| free_name(kind, &taken)));
        let given = given.cloned();
        if let Some(id) = given.clone().filter(|id| taken.contains(id)) {
            return Err(ConfigError::IdTaken { flag, id });
        }
        if !config.put(device) {
            let reason = format!("a VM has at most one {kind} device, and this VM has one already");
            return Err(ConfigError::Conflict { flag, reason });
        }
        config.validate()?;
        // The validation has checked the derived ID of a volume. An NVDIMM has none.
        let id = given.or_else(|| {
            let added = config.pm_volumes.last();
            config.volumes_with_ids().find(|(volume, _)| Some(*volume) == added).map(|(_, id)| id)
        });
        *self = config;
        Ok(id.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::config::test_config;

    fn disk(text: &str) -> DeviceConfig {
        DeviceConfig::Disk(DiskConfig::parse(text).unwrap())
    }

    fn add(config: &mut VmConfig, device: DeviceConfig) -> Result<String, String> {
        config.add_device(device, &["_disk8".to_owned()]).map_err(|error| error.to_string())
    }

    #[test]
    fn ids_are_assigned_once_and_do_not_change() {
        let mut config = test_config();
        config.disks = ["path=/a", "path=/b,id=_disk0", "path=/c"]
            .map(|text| DiskConfig::parse(text).unwrap())
            .to_vec();
        config.name_devices();
        let ids = |config: &VmConfig| {
            config.disks.iter().map(|disk| disk.id.clone().unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(ids(&config), ["_disk1", "_disk0", "_disk2"]);
        assert!(config.remove_device("_disk0"));
        assert_eq!(add(&mut config, disk("path=/d")), Ok("_disk0".to_owned()));
        assert_eq!(add(&mut config, disk("path=/e")), Ok("_disk3".to_owned()));
        assert_eq!(ids(&config), ["_disk1", "_disk2", "_disk0", "_disk3"]);
        // An ID is not reused while the guest has not released its device.
        (4..8).for_each(|nth| {
            assert_eq!(add(&mut config, disk("path=/f")), Ok(format!("_disk{nth}")))
        });
        assert_eq!(add(&mut config, disk("path=/g")), Ok("_disk9".to_owned()));
        assert!(add(&mut config, disk("path=/h,id=_disk8")).is_err());
        let before = config.clone();
        config.name_devices();
        assert_eq!(config, before);
    }

    #[test]
    fn ids_are_unique_across_kinds() {
        let mut config = test_config();
        config.balloon = Some(BalloonConfig::parse("size=0,id=air").unwrap());
        config.memory.zones = vec![MemoryZoneConfig::parse("id=left,size=512M").unwrap()];
        config.memory.size = 0;
        add(&mut config, DeviceConfig::Pmem(PmemConfig::parse("file=/p,id=p").unwrap())).unwrap();
        let before = config.clone();
        for id in ["air", "left", "p"] {
            let error = add(&mut config, disk(&format!("path=/d,id={id}"))).unwrap_err();
            assert_eq!(error, format!("--disk: the id {id} is already in use; choose another id"));
        }
        assert_eq!(config, before);
    }

    #[test]
    fn configuration_with_duplicate_ids_is_refused() {
        let mut config = test_config();
        config.net = vec![NetConfig::parse("id=a").unwrap()];
        config.disks = vec![
            DiskConfig::parse("path=/d").unwrap(),
            DiskConfig::parse("path=/e,id=_disk0").unwrap(),
        ];
        // The device without an ID is given another ID.
        assert_eq!(config.validate(), Ok(()));
        config.disks[0].id = Some("a".to_owned());
        let taken = ConfigError::IdTaken { flag: "--net", id: "a".to_owned() };
        assert_eq!(config.validate(), Err(taken));
        // Reserved IDs cannot be assigned.
        config.net.clear();
        config.disks[0].id = Some("__rng".to_owned());
        assert!(config.validate().unwrap_err().to_string().contains("__"));
        config.pm_memory = vec![PmMemoryConfig::parse("pool=/p,size=2M").unwrap()];
        for id in ["mem-dram", "mem-pm"] {
            config.disks[0].id = Some(id.to_owned());
            assert_eq!(
                config.validate(),
                Err(ConfigError::IdTaken { flag: "--disk", id: id.to_owned() })
            );
        }
        config.disks[0].id = Some("watchdog".to_owned());
        assert_eq!(config.validate(), Ok(()));
    }

    #[test]
    fn volume_device_occupies_its_id() {
        let mut config = test_config();
        let volume = |text: &str| PmVolumeConfig::parse(&format!("pool={text}")).unwrap();
        config.pm_volumes = vec![
            volume("/p,name=blk,interface=virtio-blk"),
            volume("/p,name=raw,format=raw"),
            volume("/p,name=dimm"),
        ];
        assert_eq!(config.validate(), Ok(()));
        let before = config.clone();
        for id in ["blk", "pmem-raw"] {
            let error = add(&mut config, disk(&format!("path=/d,id={id}"))).unwrap_err();
            assert_eq!(error, format!("--disk: the id {id} is already in use; choose another id"));
            // Reserved IDs are also refused in the initial configuration.
            config.net = vec![NetConfig::parse(&format!("id={id}")).unwrap()];
            assert!(
                config.validate().unwrap_err().to_string().contains(&format!("has the id {id}"))
            );
            config = before.clone();
        }
        for id in ["raw", "dimm", "pmem-blk"] {
            assert_eq!(add(&mut config, disk(&format!("path=/d,id={id}"))), Ok(id.to_owned()));
        }
        // Reserved IDs are also refused for volumes.
        config.pm_volumes.push(volume("/p,name=__rng,interface=virtio-blk"));
        assert!(config.validate().unwrap_err().to_string().contains("has the id __rng"));
    }

    #[test]
    fn network_interface_has_the_descriptors_of_its_request() {
        let fd = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let net = |json: Value, fds| DeviceConfig::net(json.as_object().unwrap().clone(), fds);
        let read = net(
            json!({"id": "n", "ip": "10.0.0.1", "mask": "255.0.0.0", "fds": [3, 4]}),
            vec![fd()],
        );
        let (DeviceConfig::Net(given), warnings) = read.unwrap() else { panic!() };
        assert!(given.fds.len() == 1 && given.fds[0].is_held());
        assert!(
            warnings.len() == 1 && warnings[0].starts_with("--net: fds in JSON"),
            "{warnings:?}"
        );
        let error = net(json!({"fds": ["3"]}), Vec::new()).unwrap_err().to_string();
        assert!(
            error.starts_with("--net: fds=[\"3\"] is not supported")
                && error.contains("vm.add-net"),
            "{error}"
        );
        let mut config = test_config();
        assert_eq!(add(&mut config, DeviceConfig::Net(given.clone())), Ok("n".to_owned()));
        let (two, _) = net(json!({}), vec![fd(), fd()]).unwrap();
        assert!(
            add(&mut config, two)
                .unwrap_err()
                .contains("fd has 2 descriptors, but num_queues needs 1")
        );
        config.address_devices(|| MacAddress::local([4; 6]));
        assert_eq!(config.net[0].mac, Some(MacAddress::local([4; 6])));
        config.address_devices(|| panic!("all have one"));
        assert!(matches!(config.device("n"), Some(DeviceConfig::Net(net)) if net.fds == given.fds));
        assert!(config.remove_device("n") && config.net.is_empty());
    }

    #[test]
    fn added_volume_has_the_id_of_its_interface() {
        let mut config = test_config();
        let volume = |text: &str| {
            DeviceConfig::Volume(PmVolumeConfig::parse(&format!("pool=/p,{text}")).unwrap())
        };
        for (text, id) in [
            ("name=a,interface=virtio-blk", "a"),
            ("name=b,interface=virtio-pmem", "pmem-b"),
            ("name=c,format=raw", "pmem-c"),
            ("name=d,interface=nvdimm", ""),
        ] {
            assert_eq!(add(&mut config, volume(text)), Ok(id.to_owned()));
        }
        let before = config.clone();
        for (text, reason) in [
            ("name=a,interface=virtio-pmem", "volume a of pool \"/p\" is given twice"),
            ("name=e,thin=on", "needs create=on"),
        ] {
            assert!(add(&mut config, volume(text)).unwrap_err().contains(reason));
        }
        assert_eq!(config, before);
        assert_eq!(config.device("pmem-b"), Some(volume("name=b,interface=virtio-pmem")));
        assert!(config.remove_device("a") && !config.remove_device("a"));
        assert!(config.remove_device("pmem-b") && !config.remove_device("d"));
        let names: Vec<_> = config.pm_volumes.iter().map(|volume| &*volume.name).collect();
        assert_eq!(names, ["c", "d"]);
    }

    #[test]
    fn invalid_device_changes_nothing() {
        let mut config = test_config();
        let vsock =
            |cid| DeviceConfig::Vsock(VsockConfig::parse(&format!("cid={cid},socket=/s")).unwrap());
        assert!(
            add(&mut config, disk("path=/d,num_queues=2")).unwrap_err().contains("num_queues is 2")
        );
        assert!(add(&mut config, vsock(2)).unwrap_err().contains("cid is 2"));
        assert_eq!(config, test_config());
        assert_eq!(add(&mut config, vsock(3)), Ok("_vsock0".to_owned()));
        assert!(add(&mut config, vsock(4)).unwrap_err().contains("one vsock device"));
        assert!(!config.remove_device("_vsock1") && config.remove_device("_vsock0"));
        assert_eq!(config, test_config());
    }

    #[test]
    fn device_json_follows_the_rules_of_a_configuration() {
        let read = |json: Value| DeviceConfig::disk(json.as_object().unwrap().clone());
        let json = json!({"path": "/d", "readonly": true, "image_type": "Raw", "vhost_user": false, "serial": null});
        assert_eq!(read(json).unwrap(), (disk("path=/d,readonly=on,image_type=raw"), Vec::new()));
        let (_, warnings) = read(json!({"path": "/d", "read_only": true})).unwrap();
        assert_eq!(warnings, ["Ignored unknown field: read_only"]);
        let error = |json| read(json).unwrap_err().to_string();
        assert!(
            error(json!({"path": "/d", "iommu": true}))
                .starts_with("--disk: iommu=true is not supported")
        );
        assert_eq!(error(json!({})), "path is missing");
        assert_eq!(error(json!({"path": 7})), "path is 7, and must be a path");
    }
}
