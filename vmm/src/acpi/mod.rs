//! ACPI tables of the guest, hardware-reduced (ACPI 6.5, 4.1), and the devices that they describe.
//!
//! [`build`] is a pure function of [`AcpiInput`] and uses neither KVM nor guest memory. The tables
//! are placed in the range reserved by the memory map, with the RSDP first:
//!
//! | table | content |
//! |---|---|
//! | FADT | flags of a machine without legacy hardware; sleep and reset registers of [`pm::PmPort`] |
//! | MADT | one local APIC for each possible vCPU, one I/O APIC |
//! | MCFG | configuration space of bus 0 |
//! | DSDT | PCI root, serial port, vCPUs, power button, NVDIMM root, DIMMs that can be plugged |
//! | SRAT, SLIT, HMAT | memory and vCPUs of each NUMA node, if there is more than one node |
//! | NFIT | NVDIMMs, if there are any |

pub(crate) mod dimms;
mod dsdt;
mod fixed;
pub(crate) mod ged;
pub(crate) mod hotplug;
pub(crate) mod hotplug_cpus;
mod nfit;
mod numa;
pub(crate) mod plug;
pub(crate) mod pm;

use acpi_tables::Aml;
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use balloon::proto::ACPI_OEM_ID;
use foreshore_devices::memory::layout::{ACPI_END, RSDP_START};
use foreshore_devices::nvdimm::Nvdimm;
use thiserror::Error;
use vm_memory::{Address, Bytes, GuestMemoryBackend};

pub(crate) use numa::{NodeMemory, NumaNode, Performance};

const OEM_ID: [u8; 6] = ACPI_OEM_ID;
const OEM_TABLE_ID: [u8; 8] = *b"FORESHOR";
const OEM_REVISION: u32 = 1;
/// Alignment of tables. Linux reads 64-bit fields of the tables at natural alignment where
/// possible.
const TABLE_ALIGN: usize = 16;

/// Machine that the tables describe.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct AcpiInput {
    /// vCPUs that are online at boot.
    pub boot_vcpus: u8,
    /// Upper limit of the number of vCPUs.
    pub max_vcpus: u8,
    /// APIC IDs of all vCPUs. A vCPU beyond the end of the list has its index as its APIC ID.
    pub apic_ids: Vec<u8>,
    /// True if the machine has COM1.
    pub serial: bool,
    /// True if memory can be plugged as DIMMs.
    pub dimms: bool,
    /// True if the machine has a real-time clock.
    pub rtc: bool,
    /// NUMA nodes. With fewer than two nodes, the tables that describe nodes are omitted.
    pub nodes: Vec<NumaNode>,
    /// NVDIMMs. NVDIMM n has handle n + 1 and flush hint page n.
    pub nvdimms: Vec<Nvdimm>,
}

impl AcpiInput {
    fn apic_id(&self, vcpu: u8) -> u8 {
        self.apic_ids.get(usize::from(vcpu)).copied().unwrap_or(vcpu)
    }
}

#[derive(Debug, Error)]
pub(crate) enum AcpiError {
    #[error("the ACPI tables have {actual_bytes} bytes, and must have at most {limit_bytes}")]
    TooLarge { actual_bytes: usize, limit_bytes: usize },
    /// The range of an NVDIMM is empty, or its start or size is not a multiple of the page size.
    #[error(
        "the size of the NVDIMM at {start:#x}, {size_bytes} bytes, is not a multiple of the page size"
    )]
    BadNvdimm { start: u64, size_bytes: u64 },
    /// Guest memory ends below the address of the ACPI tables.
    #[error("cannot write the ACPI tables at {:#x}", RSDP_START.raw_value())]
    Write(#[from] vm_memory::GuestMemoryError),
}

/// All tables, as they are laid out in guest memory from [`RSDP_START`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AcpiTables {
    bytes: Vec<u8>,
}

impl AcpiTables {
    pub(crate) fn write<M: GuestMemoryBackend>(&self, memory: &M) -> Result<(), AcpiError> {
        Ok(memory.write_slice(&self.bytes, RSDP_START)?)
    }

    /// Appends `table` and returns its guest-physical address.
    fn place(&mut self, table: &[u8]) -> u64 {
        self.bytes.resize(self.bytes.len().next_multiple_of(TABLE_ALIGN), 0);
        let address = RSDP_START.raw_value() + self.bytes.len() as u64;
        self.bytes.extend_from_slice(table);
        address
    }
}

pub(crate) fn build(input: &AcpiInput) -> Result<AcpiTables, AcpiError> {
    let mut tables = AcpiTables { bytes: vec![0; Rsdp::len()] };
    let mut xsdt = XSDT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    let dsdt = tables.place(&dsdt::dsdt(input));
    // Every firmware lists the FADT first.
    let mut others = vec![fixed::fadt(dsdt, input.rtc), fixed::madt(input), fixed::mcfg()];
    if input.nodes.len() > 1 {
        others.extend(numa::tables(&input.nodes));
    }
    if !input.nvdimms.is_empty() {
        others.push(nfit::nfit(&input.nvdimms)?);
    }
    for table in others {
        xsdt.add_entry(tables.place(&table));
    }
    let xsdt = tables.place(&bytes_of(&xsdt));
    tables.bytes[..Rsdp::len()].copy_from_slice(&bytes_of(&Rsdp::new(OEM_ID, xsdt)));
    let limit_bytes = (ACPI_END - RSDP_START.raw_value()) as usize;
    let actual_bytes = tables.bytes.len();
    if actual_bytes > limit_bytes {
        return Err(AcpiError::TooLarge { actual_bytes, limit_bytes });
    }
    Ok(tables)
}

fn bytes_of(aml: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    aml.to_aml_bytes(&mut bytes);
    bytes
}

/// Adds the common header (ACPI 6.5, 5.2.6) to `body`.
fn table(signature: [u8; 4], revision: u8, body: &[u8]) -> Vec<u8> {
    const HEADER_BYTES: u32 = 36;
    let mut sdt = Sdt::new(signature, HEADER_BYTES, revision, OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    sdt.append_slice(body);
    sdt.as_slice().to_vec()
}

#[cfg(test)]
mod tests {
    use vm_memory::{GuestAddress, GuestMemoryMmap};

    use super::*;

    fn u32_at(bytes: &[u8], offset: usize) -> u32 {
        u32::from_le_bytes(*bytes[offset..].first_chunk().unwrap())
    }

    fn u64_at(bytes: &[u8], offset: usize) -> u64 {
        u64::from_le_bytes(*bytes[offset..].first_chunk().unwrap())
    }

    fn sum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
    }

    /// Returns the table at guest-physical `address` after checking its alignment and checksum.
    fn table_at(tables: &AcpiTables, address: u64) -> &[u8] {
        let offset = (address - RSDP_START.raw_value()) as usize;
        assert!(offset.is_multiple_of(TABLE_ALIGN));
        let len = u32_at(&tables.bytes, offset + 4) as usize;
        let table = &tables.bytes[offset..offset + len];
        assert_eq!(sum(table), 0, "checksum of {}", String::from_utf8_lossy(&table[..4]));
        table
    }

    /// Signature and bytes of every table. The tables are located in the same way as by a guest:
    /// RSDP, XSDT, FADT, DSDT.
    fn walk(tables: &AcpiTables) -> Vec<(String, &[u8])> {
        let rsdp = &tables.bytes[..36];
        assert_eq!(&rsdp[..8], b"RSD PTR ");
        // ACPI 6.5, 5.2.5.3: two checksums, revision 2, length 36.
        assert_eq!((sum(&rsdp[..20]), sum(rsdp), rsdp[15], u32_at(rsdp, 20)), (0, 0, 2, 36));
        let xsdt = table_at(tables, u64_at(rsdp, 24));
        assert_eq!(&xsdt[..4], b"XSDT");
        let mut found: Vec<&[u8]> = (36..xsdt.len())
            .step_by(8)
            .map(|offset| table_at(tables, u64_at(xsdt, offset)))
            .collect();
        assert_eq!(&found[0][..4], b"FACP");
        // ACPI 6.5, table 5.9: X_DSDT at 140.
        found.push(table_at(tables, u64_at(found[0], 140)));
        found
            .into_iter()
            .map(|table| (String::from_utf8(table[..4].to_vec()).unwrap(), table))
            .collect()
    }

    fn large() -> AcpiInput {
        let memory = |start: u64, len: u64, hotpluggable| NodeMemory { start, len, hotpluggable };
        let performance = |latency_ns, bandwidth_mb_per_s| Performance {
            read_latency_ns: latency_ns,
            write_latency_ns: latency_ns,
            bandwidth_mb_per_s,
        };
        AcpiInput {
            boot_vcpus: 2,
            max_vcpus: 4,
            apic_ids: vec![],
            dimms: true,
            serial: true,
            rtc: false,
            nodes: vec![
                NumaNode {
                    vcpus: (0..4).collect(),
                    memory: vec![memory(0, 1 << 29, false), memory(1 << 32, 1 << 30, true)],
                    distances: vec![10, 17],
                    near: 0,
                    performance: vec![performance(90, 50_000)],
                },
                NumaNode {
                    vcpus: vec![],
                    memory: vec![memory(8 << 30, 4 << 30, true)],
                    distances: vec![17, 10],
                    near: 0,
                    performance: vec![performance(300, 8_000)],
                },
            ],
            nvdimms: vec![
                Nvdimm {
                    start: 16 << 30,
                    size_bytes: 1 << 30,
                    node: 1,
                    flush_hint: true,
                    read_only: false,
                },
                Nvdimm {
                    start: 17 << 30,
                    size_bytes: 1 << 21,
                    node: 0,
                    flush_hint: false,
                    read_only: true,
                },
            ],
        }
    }

    #[test]
    fn every_table_is_reachable_from_the_rsdp() {
        let small = AcpiInput { boot_vcpus: 1, max_vcpus: 1, ..AcpiInput::default() };
        let tables = build(&small).unwrap();
        let names: Vec<String> = walk(&tables).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["FACP", "APIC", "MCFG", "DSDT"]);
        let tables = build(&large()).unwrap();
        let names: Vec<String> = walk(&tables).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["FACP", "APIC", "MCFG", "SRAT", "SLIT", "HMAT", "NFIT", "DSDT"]);
    }

    #[test]
    fn tables_for_all_vcpus_fit_and_larger_ones_are_refused() {
        let mut input = AcpiInput { boot_vcpus: 255, max_vcpus: 255, ..large() };
        assert!(build(&input).unwrap().bytes.len() < 0x5_f000);
        input.nvdimms = vec![input.nvdimms[0]; 4000];
        assert!(matches!(build(&input), Err(AcpiError::TooLarge { limit_bytes: 0x5_f000, .. })));
    }

    #[test]
    fn tables_are_written_where_the_start_info_points() {
        let memory: GuestMemoryMmap =
            GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        let tables = build(&large()).unwrap();
        tables.write(&memory).unwrap();
        let mut bytes = vec![0; tables.bytes.len()];
        memory.read_slice(&mut bytes, RSDP_START).unwrap();
        assert_eq!(bytes, tables.bytes);
        let tiny: GuestMemoryMmap =
            GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0xa_0000)]).unwrap();
        assert!(matches!(tables.write(&tiny), Err(AcpiError::Write(_))));
    }

    /// Writes the tables to the directory in `FORESHORE_ACPI_DUMP`, for inspection with `iasl -d`.
    #[test]
    fn tables_can_be_dumped() {
        let Some(directory) = std::env::var_os("FORESHORE_ACPI_DUMP") else {
            eprintln!("skipped: FORESHORE_ACPI_DUMP names no directory");
            return;
        };
        for (name, table) in walk(&build(&large()).unwrap()) {
            let path =
                std::path::Path::new(&directory).join(format!("{}.aml", name.to_lowercase()));
            std::fs::write(path, table).unwrap();
        }
    }
}
