"""Words that prompts are made of: common and short, so that most tokenizers have one token for each."""

_TEXT = """
    able above across add after again air all almost along also always animal answer any apple area arm around art ask
    away baby back bad bag ball bank base bear beat bed before begin behind bell best better big bird black blood blue
    board boat body bone book both bottom bowl box boy branch bread break bridge bright bring brother brown build burn
    busy buy cake call camp capital car card care carry case cat catch cause cell center chain chair chance change
    check child choose church circle city class clean clear climb clock close cloud coast coat cold color come common
    cook cool copy corn corner cost cotton count country course cover cow create crop cross crowd cry current cut
    dance dark day dead deal dear deep desert dinner divide doctor dog dollar door double down draw dream dress drink
    drive drop dry during each early earth east easy eat edge egg eight end energy engine enough enter equal even
    evening every exact eye face fact fair fall family famous far farm fast father fear feed feel feet field fight
    figure fill final find fine finger fire first fish fit five flat floor flow flower fly follow food foot force
    forest form forward four free fresh friend front fruit full game garden gas gather general gentle girl give glad
    glass go gold good grand grass gray great green ground group grow guess guide gun hair half hand happen happy hard
    hat head hear heart heat heavy help here high hill history hit hold hole home hope horse hot hour house hundred
    hunt hurry ice idea inch island job join jump just keep key kind king knew know lady lake land language large last
    late laugh law lead learn leave left leg less letter level lie life lift light line liquid list listen little live
    locate log lone long look lost loud love low machine made main major make many map mark market mass master match
    matter mean meat meet melody men metal method middle mile milk million mind mine minute miss mix modern money month
    moon more morning most mother motion mountain mouth move much music name nation near neck need new next night nine
    noise noon north nose note nothing notice noun now number object ocean offer office oil old once one only open
    order other over own oxygen page paint pair paper parent part party pass past path pattern pay people period
"""
WORDS = tuple(_TEXT.split())
