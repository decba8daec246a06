//! Tests of firmware boots. A test firmware reports the machine, and firmware provided by the user
//! boots a Debian kernel from a disk.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use guest_tests::disk::sparse_file;
use guest_tests::runner::this_tests_dir;
use guest_tests::{Guest, Image, Kernel, skip};

use crate::esp;

guest_tests::tests![
    firmware_finds_the_tables_and_devices on none,
    a_users_firmware_boots_debian_from_a_disk: 600 on [V6_12 & V6_1],
];

/// Time limit for a boot. The time limit is long because firmware scans every slot and the guest
/// decompresses its own kernel.
const BOOT_LIMIT: Duration = Duration::from_secs(240);
const END_LIMIT: Duration = Duration::from_secs(60);

/// Address of the test firmware in guest memory, and the offset of its code in the file.
const LOAD_ADDRESS: u64 = 0x10_0000;
const CODE_OFFSET: u64 = 0x1000;
/// Guest address of the first byte of the code, where execution starts.
pub(crate) const ENTRY: u64 = LOAD_ADDRESS + CODE_OFFSET;

// PVH enters the code in 32-bit protected mode, with the address of the start info in EBX. The code
// reports the machine on COM1 and powers it off. It does not run at the address it is assembled
// for. Its addresses are relative to LOAD_ADDRESS + CODE_OFFSET, which is 0x101000.
std::arch::global_asm!(
    r#"
    .pushsection .rodata.test_firmware, "a"
    .code32
test_firmware:
    mov $0x80000, %esp
    mov %ebx, %ebp
    cld
    cmpl $0x336ec578, (%ebp)
    jne 9f
    mov $(test_firmware_started - test_firmware + 0x101000), %esi
    call test_firmware_puts
    // The number of entries in the memory map.
    mov 48(%ebp), %eax
    call test_firmware_put_number
    // The first 4 bytes of the RSDP.
    mov 32(%ebp), %edi
    mov (%edi), %eax
    call test_firmware_put_number
    // The first byte of the command line, which is empty.
    mov 24(%ebp), %edi
    movzbl (%edi), %eax
    call test_firmware_put_number
    mov $(test_firmware_newline - test_firmware + 0x101000), %esi
    call test_firmware_puts
    // The ID of the device in each slot, read through the configuration ports.
    xor %ecx, %ecx
2:
    mov %ecx, %eax
    shl $11, %eax
    or $0x80000000, %eax
    mov $0xcf8, %dx
    out %eax, %dx
    mov $0xcfc, %dx
    in %dx, %eax
    cmp $0xffffffff, %eax
    je 3f
    mov %eax, %ebx
    mov $(test_firmware_slot - test_firmware + 0x101000), %esi
    call test_firmware_puts
    mov %ebx, %eax
    call test_firmware_put_number
    // The byte at 0x14 in BAR 0, which the firmware leaves where it is: the status of a virtio
    // device, which is 0 after a reset.
    mov %ecx, %eax
    shl $11, %eax
    or $0x80000010, %eax
    mov $0xcf8, %dx
    out %eax, %dx
    mov $0xcfc, %dx
    in %dx, %eax
    and $0xfffffff0, %eax
    jz 4f
    mov 0x14(%eax), %eax
    movzbl %al, %eax
    call test_firmware_put_number
4:
    mov $(test_firmware_newline - test_firmware + 0x101000), %esi
    call test_firmware_puts
3:
    inc %ecx
    cmp $32, %ecx
    jne 2b
    // The century, and the flag of an update in progress, from the RTC.
    mov $(test_firmware_clock - test_firmware + 0x101000), %esi
    call test_firmware_puts
    mov $0x32, %al
    out %al, $0x70
    in $0x71, %al
    movzbl %al, %eax
    call test_firmware_put_number
    mov $0x0a, %al
    out %al, $0x70
    in $0x71, %al
    and $0x80, %eax
    call test_firmware_put_number
    mov $(test_firmware_newline - test_firmware + 0x101000), %esi
    call test_firmware_puts
    mov $(test_firmware_done - test_firmware + 0x101000), %esi
    call test_firmware_puts
9:
    // Sleep state 5.
    mov $0x34, %al
    mov $0x600, %dx
    out %al, %dx
8:
    hlt
    jmp 8b

test_firmware_puts:
    mov $0x3f8, %dx
5:
    lodsb
    test %al, %al
    jz 6f
    out %al, %dx
    jmp 5b
6:
    ret

// EAX in hexadecimal after a space.
test_firmware_put_number:
    push %ecx
    push %ebx
    mov %eax, %ebx
    mov $0x3f8, %dx
    mov $0x20, %al
    out %al, %dx
    mov $8, %ecx
7:
    rol $4, %ebx
    mov %bl, %al
    and $15, %al
    add $0x30, %al
    cmp $0x3a, %al
    jb 1f
    add $0x27, %al
1:
    out %al, %dx
    loop 7b
    pop %ebx
    pop %ecx
    ret

test_firmware_started: .asciz "firmware: started"
test_firmware_slot: .asciz "firmware: slot"
test_firmware_clock: .asciz "firmware: clock"
test_firmware_done: .asciz "firmware: done\n"
test_firmware_newline: .asciz "\n"
test_firmware_end:
    .code64
    .global TEST_FIRMWARE_BYTES
    .global TEST_FIRMWARE_LEN
    .popsection
    .pushsection .data.test_firmware, "aw"
    .balign 8
TEST_FIRMWARE_BYTES: .quad test_firmware
TEST_FIRMWARE_LEN: .quad test_firmware_end - test_firmware
    .popsection
    "#,
    options(att_syntax)
);

unsafe extern "C" {
    static TEST_FIRMWARE_BYTES: *const u8;
    static TEST_FIRMWARE_LEN: usize;
}

fn code() -> &'static [u8] {
    // SAFETY: the assembler defines both constants: the start of the code in read-only data, and
    // its length.
    unsafe { std::slice::from_raw_parts(TEST_FIRMWARE_BYTES, TEST_FIRMWARE_LEN) }
}

/// Returns an ELF file with `code` and the note that gives PVH the entry point. It has one segment,
/// which also contains the note.
pub(crate) fn elf(code: &[u8]) -> Vec<u8> {
    const NOTE_OFFSET: u64 = 0x200;
    const NOTE_LEN: u64 = 20;
    const PHYS32_ENTRY: u32 = 18;
    let len = CODE_OFFSET + code.len() as u64;
    let mut file = Vec::new();
    file.extend([0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    let halves = |file: &mut Vec<u8>, values: &[u16]| {
        values.iter().for_each(|value| file.extend(value.to_le_bytes()));
    };
    let words = |file: &mut Vec<u8>, values: &[u32]| {
        values.iter().for_each(|value| file.extend(value.to_le_bytes()));
    };
    let longs = |file: &mut Vec<u8>, values: &[u64]| {
        values.iter().for_each(|value| file.extend(value.to_le_bytes()));
    };
    // Executable for x86-64, with two program headers that follow the file header.
    halves(&mut file, &[2, 62]);
    words(&mut file, &[1]);
    longs(&mut file, &[ENTRY, 64, 0]);
    words(&mut file, &[0]);
    halves(&mut file, &[64, 56, 2, 64, 0, 0]);
    // PT_LOAD and PT_NOTE: kind, flags, offset, addresses, lengths, alignment.
    for (kind, offset, len) in [(1, 0, len), (4, NOTE_OFFSET, NOTE_LEN)] {
        words(&mut file, &[kind, 7]);
        longs(&mut file, &[offset, LOAD_ADDRESS + offset, LOAD_ADDRESS + offset, len, len, 4]);
    }
    file.resize(NOTE_OFFSET as usize, 0);
    words(&mut file, &[4, 4, PHYS32_ENTRY]);
    file.extend(b"Xen\0");
    words(&mut file, &[ENTRY as u32]);
    file.resize(CODE_OFFSET as usize, 0);
    file.extend(code);
    file
}

pub(crate) fn write(name: &str, bytes: &[u8]) -> Result<PathBuf> {
    let dir = this_tests_dir();
    fs::create_dir_all(&dir)?;
    let path = dir.join(name);
    fs::write(&path, bytes).with_context(|| format!("Cannot write {}", path.display()))?;
    Ok(path)
}

pub(crate) fn with_firmware(path: &Path) -> guest_tests::GuestBuilder {
    let builder = Guest::builder().argument("--firmware", &path.display().to_string());
    ["--kernel", "--initramfs", "--cmdline"]
        .into_iter()
        .fold(builder, |builder, flag| builder.without(flag))
}

fn numbers(log: &str, label: &str) -> Result<Vec<Vec<u32>>> {
    let lines = log.lines().filter_map(|line| line.strip_prefix(label));
    let numbers =
        |line: &str| line.split_whitespace().map(|text| u32::from_str_radix(text, 16)).collect();
    Ok(lines.map(numbers).collect::<Result<_, _>>()?)
}

fn firmware_finds_the_tables_and_devices() -> Result<()> {
    let path = write("firmware.elf", &elf(code()))?;
    let disk = sparse_file("disk.raw", 1 << 20)?;
    let guest =
        with_firmware(&path).argument("--disk", &format!("path={}", disk.display())).start()?;
    let console = guest.console_file();
    let log = guest.vmm_log()?;
    let status = guest.wait_for_exit(END_LIMIT).with_context(|| log)?;
    let text = fs::read_to_string(&console)?;
    ensure!(
        status.success() && text.contains("firmware: done"),
        "The firmware test ended with {status}:\n{text}"
    );
    let started = numbers(&text, "firmware: started")?;
    // Low memory up to 640 KiB, the tables, the rest, and the reserved range above.
    ensure!(started == [[4, u32::from_le_bytes(*b"RSD "), 0]], "{started:x?}");
    let slots = numbers(&text, "firmware: slot")?;
    // The host bridge does not have a BAR.
    let (bridge, devices) = slots.split_first().context("The bus has no slots")?;
    ensure!(bridge.len() == 1, "{slots:x?}");
    // Entropy, vsock and disk devices. Each has a BAR that responds like a device after a reset.
    for kind in [0x1044, 0x1053, 0x1042] {
        let wanted = [kind << 16 | 0x1af4, 0];
        ensure!(
            devices.iter().any(|device| *device == wanted),
            "Device {kind:x} does not answer: {slots:x?}"
        );
    }
    ensure!(devices.iter().all(|device| device[1] == 0), "A BAR does not answer: {slots:x?}");
    let clock = numbers(&text, "firmware: clock")?;
    ensure!(clock == [[0x20, 0]], "{clock:x?}");
    Ok(())
}

/// Runs the firmware given by FORESHORE_TEST_FIRMWARE, for example rust-hypervisor-firmware. It is
/// not built in because no available package contains firmware of this kind.
fn a_users_firmware_boots_debian_from_a_disk() -> Result<()> {
    let Some(firmware) = std::env::var_os("FORESHORE_TEST_FIRMWARE") else {
        return skip("FORESHORE_TEST_FIRMWARE names no firmware");
    };
    let firmware =
        fs::canonicalize(&firmware).with_context(|| format!("Cannot find {firmware:?}"))?;
    for kernel in [Kernel::V6_12, Kernel::V6_1] {
        let entry = "title Debian\nlinux /vmlinuz\ninitrd /initrd.img\noptions console=ttyS0 loglevel=5 from=disk\n";
        let image = esp::disk(&[
            ("vmlinuz", &fs::read(kernel.path())?),
            ("initrd.img", &fs::read(Image::Basic.path(kernel))?),
            ("loader/loader.conf", b"default debian.conf\n"),
            ("loader/entries/debian.conf", entry.as_bytes()),
        ]);
        let disk = write(&format!("disk-{kernel}.raw"), &image)?;
        let guest = with_firmware(&firmware)
            .memory("size=768M")
            .argument("--disk", &format!("path={},image_type=raw", disk.display()))
            .boot_limit(BOOT_LIMIT)
            .boot()?;
        ensure!(
            guest.run("cat /proc/cmdline")?.contains("from=disk"),
            "{kernel}: the guest was not booted from the disk"
        );
        ensure!(guest.run("uname -r")?.starts_with(&format!("{kernel}.")), "It is another kernel");
        guest.no_kernel_complaints()?;
        guest.power_off()?;
        fs::remove_file(&disk)?;
    }
    Ok(())
}
